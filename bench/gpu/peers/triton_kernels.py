"""The DropKV score as two Triton kernels and a merge, after the paper's description; launched by triton_score.py.

attend  flash attention of the g * w observation rows of a KV head, split over the keys: partial outputs and sums
merge   partials of all splits to the rows' outputs and log-sum-exps
score   tiles over the keys: weights again from the log-sum-exp, distances from the output, summed over the rows

Nothing of size keys x rows is stored. q and out [B, Hkv, g * w, d], k and v [B, Hkv, tokens, d], lse [B, Hkv, g * w]
and scores [B, Hkv, tokens] are contiguous. Row r of a KV head sees the first n - w + 1 + r % w of its n tokens.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(base, rows, limit, D: tl.constexpr, D_PAD: tl.constexpr, BOUNDED: tl.constexpr):
    """Rows of a [limit, D] matrix as a tile [len(rows), D_PAD]; zeros beyond D and, where BOUNDED, beyond limit."""
    cols = tl.arange(0, D_PAD)
    at = base + rows[:, None] * D + cols[None, :]
    if BOUNDED and D != D_PAD:
        return tl.load(at, mask=(rows[:, None] < limit) & (cols[None, :] < D), other=0.0)
    if BOUNDED:
        return tl.load(at, mask=rows[:, None] < limit, other=0.0)
    if D != D_PAD:
        return tl.load(at, mask=cols[None, :] < D, other=0.0)
    return tl.load(at)


@triton.jit
def _clear_end(begin, end, n, W: tl.constexpr, BLOCK_N: tl.constexpr):
    """End of the whole tiles from `begin` on whose tokens every row sees."""
    clear = tl.maximum(begin, tl.minimum(end, n - W + 1))
    return begin + (clear - begin) // BLOCK_N * BLOCK_N


@triton.jit
def _softmax_step(q, k, v, tokens, visible, scale2, top, total, out, MASKED: tl.constexpr):
    """One tile of the online softmax, in units of log2."""
    logits = tl.dot(q, tl.trans(k)) * scale2
    if MASKED:
        logits = tl.where(tokens[None, :] < visible[:, None], logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    # A row that has seen nothing yet has the maximum -inf; 0 stands in for it in the differences.
    base = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
    weights = tl.exp2(logits - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None])
    return new_top, total, out


@triton.jit(do_not_specialize=["max_tokens", "split_tokens"])
def attend_kernel(
    q, k, v, lengths, part_top, part_total, part_out, scale2, max_tokens, split_tokens, kv_heads,
    ROWS: tl.constexpr, W: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    split, list_id, row_block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tl.load(lengths + list_id // kv_heads)
    begin = split * split_tokens
    end = tl.minimum(begin + split_tokens, n)
    clear_end = _clear_end(begin, end, n, W, BLOCK_N)
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    visible = n - W + 1 + rows % W
    queries = _load(q + list_id.to(tl.int64) * ROWS * D, rows, ROWS, D, D_PAD, True)
    keys = k + list_id.to(tl.int64) * max_tokens * D
    values = v + list_id.to(tl.int64) * max_tokens * D

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    for start in range(begin, clear_end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        k_tile = _load(keys, tokens, n, D, D_PAD, False)
        v_tile = _load(values, tokens, n, D, D_PAD, False)
        top, total, out = _softmax_step(queries, k_tile, v_tile, tokens, visible, scale2, top, total, out, False)
    for start in range(clear_end, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        k_tile = _load(keys, tokens, n, D, D_PAD, True)
        v_tile = _load(values, tokens, n, D, D_PAD, True)
        seen = tl.minimum(visible, end)
        top, total, out = _softmax_step(queries, k_tile, v_tile, tokens, seen, scale2, top, total, out, True)

    at = (list_id.to(tl.int64) * tl.num_programs(0) + split) * ROWS + rows
    cols = tl.arange(0, D_PAD)
    tl.store(part_top + at, top, mask=rows < ROWS)
    tl.store(part_total + at, total, mask=rows < ROWS)
    tl.store(part_out + at[:, None] * D + cols[None, :], out, mask=(rows[:, None] < ROWS) & (cols[None, :] < D))


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(
    part_top, part_total, part_out, out, lse, splits, ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    MAX_SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
):
    row, list_id = tl.program_id(0), tl.program_id(1)
    first = list_id.to(tl.int64) * splits * ROWS + row
    every = tl.arange(0, MAX_SPLITS)
    tops = tl.load(part_top + first + every * ROWS, mask=every < splits, other=float("-inf"))
    totals = tl.load(part_total + first + every * ROWS, mask=every < splits, other=0.0)
    top = tl.max(tops, 0)
    total = tl.sum(totals * tl.exp2(tops - top), 0)
    cols = tl.arange(0, D_PAD)
    merged = tl.zeros([D_PAD], tl.float32)
    for start in range(0, splits, BLOCK_S):
        some = start + tl.arange(0, BLOCK_S)
        share = tl.exp2(tl.load(part_top + first + some * ROWS, mask=some < splits, other=float("-inf")) - top)
        at = part_out + (first + some[:, None] * ROWS) * D + cols[None, :]
        tile = tl.load(at, mask=(some[:, None] < splits) & (cols[None, :] < D), other=0.0)
        merged += tl.sum(tile * share[:, None], 0)
    to = list_id.to(tl.int64) * ROWS + row
    tl.store(out + to * D + cols, (merged / total).to(out.dtype.element_ty), mask=cols < D)
    tl.store(lse + to, (top + tl.log2(total)) / LOG2E)


@triton.jit
def _row_block(q, out, lse, list_id, block, ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
               BLOCK_M: tl.constexpr):
    """Queries, outputs, log2-sum-exps (inf beyond the last row: weight 0) and squared norms of the outputs."""
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    queries = _load(q + list_id.to(tl.int64) * ROWS * D, rows, ROWS, D, D_PAD, True)
    outs = _load(out + list_id.to(tl.int64) * ROWS * D, rows, ROWS, D, D_PAD, True)
    lse2 = tl.load(lse + list_id.to(tl.int64) * ROWS + rows, mask=rows < ROWS, other=float("inf")) * LOG2E
    norms = tl.sum(outs.to(tl.float32) * outs.to(tl.float32), 1)
    return queries, outs, lse2, norms, rows


@triton.jit
def _pair_sum(k, v, q, out, lse2, out_norms, rows, tokens, n, scale2, W: tl.constexpr, MASKED: tl.constexpr,
              ROWS_FIRST: tl.constexpr):
    """sum over the rows of (p / (1 - p + eps))^2 |a - v|^2 for every token of a tile.

    ROWS_FIRST: the rows are the first dimension of the products, else the tokens are. Equal results; speed decides.
    """
    v_norms = tl.sum(v.to(tl.float32) * v.to(tl.float32), 1)
    ROW_AXIS: tl.constexpr = 0 if ROWS_FIRST else 1
    TOKEN_AXIS: tl.constexpr = 1 - ROW_AXIS
    if ROWS_FIRST:
        logits = tl.dot(q, tl.trans(k)) * scale2
        products = tl.dot(out, tl.trans(v))
    else:
        logits = tl.dot(k, tl.trans(q)) * scale2
        products = tl.dot(v, tl.trans(out))
    weights = tl.exp2(logits - tl.expand_dims(lse2, TOKEN_AXIS))
    if MASKED:
        visible = tl.expand_dims(n - W + 1 + rows % W, TOKEN_AXIS)
        weights = tl.where(tl.expand_dims(tokens, ROW_AXIS) < visible, weights, 0.0)
    odds = weights / (1.0 - weights + 1e-6)
    distances = tl.expand_dims(v_norms, ROW_AXIS) - 2.0 * products + tl.expand_dims(out_norms, TOKEN_AXIS)
    return tl.sum(odds * odds * distances, ROW_AXIS)


@triton.jit(do_not_specialize=["max_tokens", "chunk_tokens"])
def score_kernel(
    q, k, v, out, lse, lengths, scores, scale2, max_tokens, chunk_tokens, kv_heads, ROWS: tl.constexpr, W: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS_FIRST: tl.constexpr,
):
    chunk, list_id = tl.program_id(0), tl.program_id(1)
    n = tl.load(lengths + list_id // kv_heads)
    begin = chunk * chunk_tokens
    end = tl.minimum(begin + chunk_tokens, n)
    clear_end = _clear_end(begin, end, n, W, BLOCK_N)
    keys = k + list_id.to(tl.int64) * max_tokens * D
    values = v + list_id.to(tl.int64) * max_tokens * D
    results = scores + list_id.to(tl.int64) * max_tokens
    share: tl.constexpr = W / ROWS  # the mean over the group
    # More rows than a block holds: the chunk's keys and values are read again, out of L2, and the scores added up.
    for block in tl.static_range((ROWS + BLOCK_M - 1) // BLOCK_M):
        queries, outs, lse2, norms, rows = _row_block(q, out, lse, list_id, block, ROWS, D, D_PAD, BLOCK_M)
        for start in range(begin, clear_end, BLOCK_N):
            tokens = start + tl.arange(0, BLOCK_N)
            k_tile = _load(keys, tokens, n, D, D_PAD, False)
            v_tile = _load(values, tokens, n, D, D_PAD, False)
            tile = share * _pair_sum(k_tile, v_tile, queries, outs, lse2, norms, rows, tokens, n, scale2, W, False,
                                     ROWS_FIRST)
            if block > 0:
                tile += tl.load(results + tokens)
            tl.store(results + tokens, tile)
        for start in range(clear_end, end, BLOCK_N):
            tokens = start + tl.arange(0, BLOCK_N)
            k_tile = _load(keys, tokens, n, D, D_PAD, True)
            v_tile = _load(values, tokens, n, D, D_PAD, True)
            tile = share * _pair_sum(k_tile, v_tile, queries, outs, lse2, norms, rows, tokens, n, scale2, W, True,
                                     ROWS_FIRST)
            if block > 0:
                tile += tl.load(results + tokens, mask=tokens < end, other=0.0)
            tl.store(results + tokens, tile, mask=tokens < end)
        if ROWS > BLOCK_M:
            tl.debug_barrier()
