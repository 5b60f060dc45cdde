"""The scores in plain PyTorch operations, as a reader of the papers would write them. One sequence at a time.

q [Hq, w, d] the observation rows' queries, k and v [Hkv, n, d], scores [Hkv, n] float32. Products in the cache's dtype,
softmax in float32 over all n keys, causal inside the window. `repeat_kv` copies keys and values once per query head, as
the public implementations do; `grouped` instead multiplies with the g query heads of a KV head as rows.
"""

import math

import torch
import torch.nn.functional as F


def repeat_kv(x: torch.Tensor, group: int) -> torch.Tensor:
    heads, tokens, dim = x.shape
    return x[:, None].expand(heads, group, tokens, dim).reshape(heads * group, tokens, dim)


class Products:
    """Products of query-head rows with the keys or values of their KV head."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, group: int, grouped: bool = False):
        self.group, self.grouped = group, grouped
        self.k, self.v = (k, v) if grouped else (repeat_kv(k, group), repeat_kv(v, group))

    def _product(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        if not self.grouped:
            return torch.matmul(rows, columns)
        heads, count, dim = rows.shape
        return torch.matmul(rows.view(heads // self.group, -1, dim), columns).view(heads, count, -1)

    def with_keys(self, rows: torch.Tensor) -> torch.Tensor:
        return self._product(rows, self.k.transpose(-1, -2))

    def with_values(self, rows: torch.Tensor) -> torch.Tensor:
        return self._product(rows, self.v.transpose(-1, -2))

    def of_weights(self, weights: torch.Tensor) -> torch.Tensor:
        return self._product(weights.to(self.v.dtype), self.v)

    def value_norms(self) -> torch.Tensor:
        """[Hq or Hkv, n] |v|^2."""
        norms = self.v.float().square().sum(-1)
        return norms.repeat_interleave(self.group, 0) if self.grouped else norms


def masked_logits(products: Products, q: torch.Tensor) -> torch.Tensor:
    """[Hq, w, n] in the cache's dtype."""
    window, dim = q.shape[1:]
    logits = products.with_keys(q) / math.sqrt(dim)
    later = torch.ones(window, window, dtype=torch.bool, device=q.device).triu(1)
    logits[:, :, -window:].masked_fill_(later, float("-inf"))
    return logits


def attention(products: Products, q: torch.Tensor) -> torch.Tensor:
    """[Hq, w, n] softmax weights, float32."""
    return torch.softmax(masked_logits(products, q), dim=-1, dtype=torch.float32)


def squared_loss(products: Products, weights: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Sum over the rows of (p / (1 - p + eps))^2 |a - v|^2, the distance expanded; mean over the group."""
    norms = out.float().square().sum(-1)[:, :, None] + products.value_norms()[:, None, :]
    distances = norms - 2.0 * products.with_values(out.to(products.v.dtype)).float()
    odds = weights / (1.0 - weights + 1e-6)
    scores = (odds.square() * distances).sum(1)
    return scores.view(-1, products.group, scores.shape[-1]).mean(1)


def dropkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grouped: bool = False) -> torch.Tensor:
    products = Products(k, v, q.shape[0] // k.shape[0], grouped)
    weights = attention(products, q)
    return squared_loss(products, weights, products.of_weights(weights))


def dropkv_given(q, k, v, lse, out, grouped: bool = False) -> torch.Tensor:
    """lse [Hq, w] float32 and out [Hq, w, d] as the prefill's attention returned them."""
    products = Products(k, v, q.shape[0] // k.shape[0], grouped)
    weights = torch.exp(masked_logits(products, q).float() - lse[:, :, None])
    return squared_loss(products, weights, out)


# Other methods: the formulas of their public code, CAOTE's of its paper (it has no public code).


def snapkv(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Mean weight over rows and group."""
    group = q.shape[0] // k.shape[0]
    products = Products(k, k[:, :1], group)
    weights = attention(products, q).mean(1)
    return weights.view(-1, group, weights.shape[-1]).mean(1)


def snapkv_padded(q: torch.Tensor, k: torch.Tensor, pool: int = 5) -> torch.Tensor:
    """Pooled over the past tokens; the window's own scores stand above all others."""
    window = q.shape[1]
    past = pool_mean(snapkv(q, k)[:, :-window], pool // 2, pool // 2)
    return torch.cat([past, (past.max() + 1.0).expand(past.shape[0], window)], dim=1)


def criticalkv(q, k, v, output_weight: torch.Tensor, keep: int) -> torch.Tensor:
    """Half of the budget by SnapKV, the rest by SnapKV's score times |v W_O|_1. output_weight [Hq, d, hidden]."""
    group = q.shape[0] // k.shape[0]
    scores = snapkv_padded(q, k)
    projected = torch.stack([(v[h // group] @ block).abs().sum(-1) for h, block in enumerate(output_weight)])
    norms = projected.float().view(-1, group, projected.shape[-1]).mean(1)
    first = scores.topk(keep // 2, dim=-1, sorted=False).indices
    return ((scores + 1e-4) * norms).scatter(1, first, torch.finfo(torch.float32).max)


def andpro(q, k, v, pool: int = 7, chunk: int = 4) -> torch.Tensor:
    """Chunks of tokens by the projection of their part of the output on the unprotected chunks' part. [Hq, chunks].

    The chunks' parts of the output, [Hq, w, chunks, d], are not stored: <sum_t p_t v_t, D> is sum_t p_t <v_t, D>.
    """
    group, window = q.shape[0] // k.shape[0], q.shape[1]
    products = Products(k, v, group)
    weights = F.max_pool1d(attention(products, q), pool, 1, pool // 2)
    free = weights.clone()
    free[:, :, :chunk] = 0.0
    free[:, :, -window:] = 0.0
    anchors = products.of_weights(free)
    scores = (weights * products.with_values(anchors)).sum(1)
    return F.pad(scores, (0, -scores.shape[-1] % chunk)).view(scores.shape[0], -1, chunk).sum(-1)


def caote(q, k, v) -> torch.Tensor:
    """alpha / (1 - alpha) |V alpha - v| with SnapKV's pooled score, normalised over the past tokens, as alpha."""
    window = q.shape[1]
    past = pool_mean(snapkv(q, k)[:, :-window], 2, 2)
    alpha = past / past.sum(-1, keepdim=True)
    values = v[:, :-window].float()
    mean = torch.matmul(alpha[:, None], values)
    return alpha / (1.0 - alpha) * (mean - values).norm(dim=-1)


# From scores to kept tokens.


def pool_mean(raw: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """[Hkv, n]: mean of raw j-after .. j+before, zeros beyond both ends."""
    return F.avg_pool1d(F.pad(raw, (after, before))[:, None], before + after + 1, 1)[:, 0]


def top_past(pooled: torch.Tensor, keep: int, window: int) -> torch.Tensor:
    return torch.topk(pooled[:, :-window], keep - window, dim=-1, sorted=False).indices


def select(raw: torch.Tensor, keep: int, window: int, before: int, after: int) -> torch.Tensor:
    """[Hkv, keep] ascending positions: the window and the best others of every head."""
    chosen = top_past(pool_mean(raw, before, after), keep, window)
    last = torch.arange(raw.shape[1] - window, raw.shape[1], device=raw.device).expand(raw.shape[0], window)
    return torch.cat([chosen, last], dim=1).sort(dim=1).values


def select_ada(raw, keep: int, window: int, before: int, after: int, alpha: float = 0.2):
    """Offsets [Hkv + 1] and positions [Hkv * keep]: every head its safe tokens, the rest by the layer's best."""
    heads, tokens = raw.shape
    pooled = pool_mean(raw, before, after)
    pooled[:, -window:] = float("inf")
    safe = max(window, math.floor(alpha * keep + 1e-6))
    pooled.scatter_(1, pooled.topk(safe, dim=-1, sorted=False).indices, float("inf"))
    flat = pooled.view(-1).topk(heads * keep, sorted=False).indices.sort().values
    starts = torch.arange(heads + 1, device=raw.device) * tokens
    return torch.searchsorted(flat, starts), flat % tokens


def gather(k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor):
    """Kept rows [Hkv, keep, d] of both, by torch.gather."""
    index = positions[:, :, None].expand(-1, -1, k.shape[-1])
    return k.gather(1, index), v.gather(1, index)


def index_select(k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor):
    """The same by index_select over all heads' rows."""
    heads, tokens, dim = k.shape
    first = torch.arange(heads, device=k.device)[:, None] * tokens
    flat = (positions + first).view(-1)
    return k.view(-1, dim).index_select(0, flat), v.view(-1, dim).index_select(0, flat)
