"""Calls of the library for the inputs of a shape: what is timed and checked."""

import torch

import library as abi
from cases import Inputs, Shape
from check import Choice


def cache_of(inputs: Inputs) -> abi.Cache:
    s, tokens = inputs.shape, inputs.shape.tokens
    strides = {"sequence_stride": s.kv_heads * tokens * s.dim, "head_stride": tokens * s.dim, "token_stride": s.dim}
    return abi.Cache(
        dtype=abi.DTYPES[s.dtype],
        sequences=s.batch,
        kv_heads=s.kv_heads,
        key_dim=s.dim,
        value_dim=s.dim,
        max_tokens=tokens,
        k=abi.View(data=inputs.k.data_ptr(), **strides),
        v=abi.View(data=inputs.v.data_ptr(), **strides),
        lengths=inputs.lengths.data_ptr() if s.lengths else None,
    )


def rows_of(inputs: Inputs, given: bool) -> abi.Rows:
    s = inputs.shape
    rows = abi.Rows(
        q=inputs.q.data_ptr(),
        q_sequence_stride=s.query_heads * s.rows * s.dim,
        q_head_stride=s.rows * s.dim,
        q_row_stride=s.dim,
        query_heads=s.query_heads,
        rows=s.rows,
        scale=s.scale,
    )
    if given:
        rows.lse, rows.out, rows.out_dtype = inputs.lse.data_ptr(), inputs.out.data_ptr(), abi.DTYPES[s.dtype]
    return rows


class Buffers:
    """Results for one set of inputs, filled with what no kernel writes."""

    def __init__(self, shape: Shape, capacity: int):
        lists, like = shape.batch * shape.kv_heads, {"device": "cuda"}
        self.raw = torch.full((shape.batch, shape.kv_heads, shape.tokens), float("nan"), **like)
        self.offsets = torch.full((lists + 1,), -1, dtype=torch.int64, **like)
        self.positions = torch.full((capacity,), -1, dtype=torch.int32, **like)
        self.k = torch.full((capacity, shape.dim), float("nan"), dtype=shape.dtype, **like)
        self.v = torch.full_like(self.k, float("nan"))
        self.counters = torch.full((3,), -1, dtype=torch.int64, **like)

    def outputs(self, raw: bool = True, compact: int = 0) -> abi.Outputs:
        return abi.Outputs(
            raw_scores=self.raw.data_ptr() if raw else None,
            offsets=self.offsets.data_ptr(),
            positions=self.positions.data_ptr(),
            capacity=self.positions.numel(),
            k=self.k.data_ptr() if compact == abi.COMPACT_COPY else None,
            v=self.v.data_ptr() if compact == abi.COMPACT_COPY else None,
            compact=compact,
            counters=self.counters.data_ptr(),
        )


class Ours:
    """One plan and its calls, a list of them for every step: one call for every set of inputs. ahead: the rows are
    those of tokens generated behind the prompt, and have weights."""

    def __init__(self, library: abi.Library, shape: Shape, sets: list[Inputs], policy: str = "dropkv",
                 fraction: float = 0.05, given: bool = False, ahead: bool = False):
        self.shape, self.sets = shape, sets
        self.policy = library.policy(policy, window=shape.rows)
        self.fraction = fraction
        self._caches = [cache_of(inputs) for inputs in sets]
        self._rows = [rows_of(inputs, given) for inputs in sets]
        if ahead:
            self._weights = torch.linspace(0.5, 1.5, shape.rows, device="cuda").repeat(shape.batch)
            for cache, rows in zip(self._caches, self._rows):
                cache.max_generated, rows.weights = shape.rows, self._weights.data_ptr()
        arguments = shape.query_heads, shape.rows, given, self.policy, fraction
        self.plan = abi.Plan(library, self._caches[0], *arguments)
        self.buffers = [Buffers(shape, self.plan.capacity) for _ in sets]

    def choice(self, sequence: int = 0) -> Choice:
        p, n = self.policy, self.shape.all_lengths[sequence]
        keep = min(max(int(self.fraction * n + 1e-6), p.window + p.sink), n)
        return Choice(keep, p.window, p.pool_before, p.pool_after, p.heads != 0, p.pool_past_only != 0, p.alpha)

    def kept_bytes(self) -> int:
        """Bytes of the kept keys and values."""
        kept = sum(self.choice(b).keep for b in range(self.shape.batch)) * self.shape.kv_heads
        return 2 * kept * self.shape.dim * self.shape.dtype.itemsize

    def _calls(self, call) -> list:
        return [lambda i=i: call(i) for i in range(len(self.sets))]

    def score(self) -> list:
        outputs = [buffers.outputs() for buffers in self.buffers]
        return self._calls(lambda i: self.plan.score(self._caches[i], self._rows[i], outputs[i]))

    def select(self) -> list:
        outputs = [buffers.outputs() for buffers in self.buffers]
        return self._calls(lambda i: self.plan.select(self._caches[i], outputs[i]))

    def compact(self, how: int = abi.COMPACT_COPY) -> list:
        outputs = [buffers.outputs(compact=how) for buffers in self.buffers]
        return self._calls(lambda i: self.plan.compact(self._caches[i], outputs[i]))

    def run(self) -> list:
        """The whole step, scores not handed out."""
        outputs = [buffers.outputs(raw=False, compact=abi.COMPACT_COPY) for buffers in self.buffers]
        return self._calls(lambda i: self.plan.run(self._caches[i], self._rows[i], outputs[i]))


def kept_cache(shape: Shape, lists: int, longest: int, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor):
    """The ragged cache of decode attention: rows [total, d], list i is rows offsets[i] .. offsets[i + 1]."""
    return abi.Cache(
        dtype=abi.DTYPES[k.dtype],
        sequences=lists // shape.kv_heads,
        kv_heads=shape.kv_heads,
        key_dim=shape.dim,
        value_dim=shape.dim,
        max_tokens=longest,
        k=abi.View(data=k.data_ptr(), token_stride=shape.dim),
        v=abi.View(data=v.data_ptr(), token_stride=shape.dim),
        offsets=offsets.data_ptr(),
        rows_in_pool=k.shape[0],
    )
