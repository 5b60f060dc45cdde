"""Our results against the same computed in float64, on the inputs that are timed."""

import dataclasses

import torch
import torch.nn.functional as F


def _head_rows(q: torch.Tensor, k: torch.Tensor):
    """Every KV head's index and its rows' logits [g * w, n], float64; -inf where a row does not see the token."""
    heads, window, dim = q.shape
    kv_heads, tokens = k.shape[:2]
    seen = tokens - window + torch.arange(window, device=q.device) % window
    visible = seen.repeat(heads // kv_heads)
    hidden = torch.arange(tokens, device=q.device)[None, :] > visible[:, None]
    rows = q.reshape(kv_heads, -1, dim)
    for head in range(kv_heads):
        logits = rows[head].double() @ k[head].double().T / dim**0.5
        yield head, logits.masked_fill_(hidden, float("-inf"))


def attention_state(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    """lse [Hq, w] and out [Hq, w, d] of one sequence, float64."""
    lse, out = [], []
    for head, logits in _head_rows(q, k):
        lse.append(torch.logsumexp(logits, 1))
        out.append(torch.exp(logits - lse[-1][:, None]) @ v[head].double())
    return torch.stack(lse).view(q.shape[:2]), torch.stack(out).view(q.shape[0], q.shape[1], -1)


@dataclasses.dataclass
class Scores:
    """Raw scores of one sequence, [Hkv, n] float64; dominant: some row has 1 - p <= 1e-6 there."""

    dropkv: torch.Tensor
    snapkv: torch.Tensor
    dominant: torch.Tensor


def reference_scores(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Scores:
    """docs/algorithm.md section 3, exact mode."""
    group, window = q.shape[0] // k.shape[0], q.shape[1]
    dropkv, snapkv, dominant = [], [], []
    for head, logits in _head_rows(q, k):
        values = v[head].double()
        lse = torch.logsumexp(logits, 1, keepdim=True)
        weights = torch.exp(logits - lse)
        out = weights @ values
        distances = out.square().sum(1)[:, None] - 2.0 * out @ values.T + values.square().sum(1)[None, :]
        odds = weights / (1.0 - weights)
        pairs = odds.square_().mul_(distances.clamp_(min=0.0))
        rows = torch.arange(logits.shape[0], device=q.device)
        top = logits.argmax(1)
        # A row's largest weight, where it is above 1/2: from the other tokens alone, nothing cancels.
        top_weight = weights[rows, top]
        others = logits.clone()
        others[rows, top] = float("-inf")
        others_lse = torch.logsumexp(others, 1, keepdim=True)
        without = torch.exp(others - others_lse) @ values
        exact = (top_weight[:, None] * (values[top] - without)).square().sum(1)
        pairs[rows, top] = torch.where(top_weight > 0.5, exact, pairs[rows, top])
        rest = torch.exp(others_lse - lse)[:, 0]
        flagged = torch.zeros(logits.shape[1], dtype=torch.bool, device=q.device)
        flagged[top[(top_weight > 0.5) & (rest <= 1e-6)]] = True
        dropkv.append(pairs.sum(0) / group)
        snapkv.append(weights.sum(0) / (group * window))
        dominant.append(flagged)
    return Scores(torch.stack(dropkv), torch.stack(snapkv), torch.stack(dominant))


def worst(errors) -> float:
    """Largest, or NaN where one is."""
    return float(torch.tensor(list(errors), dtype=torch.float64).max())


def score_error(scores: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest relative error of a token."""
    return float(((scores.double().abs() - expected).abs() / expected.clamp_min(1e-36)).max())


def head_error(scores: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest |scores - expected| / |expected| of a head."""
    return float(((scores.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@dataclasses.dataclass
class Choice:
    """How tokens are chosen from scores: docs/algorithm.md section 4, mean pooling, no sinks."""

    keep: int
    window: int
    before: int
    after: int
    ada: bool = False
    past_only: bool = False
    alpha: float = 0.2

    def ranks(self, raw: torch.Tensor, dominant: torch.Tensor) -> torch.Tensor:
        """[Hkv, n - w] what a candidate is ordered by; dominant ones stand above all others."""
        count = raw.shape[1] - self.window
        source = raw[:, :count] if self.past_only else raw
        padded = F.pad(source, (self.after, self.before))[:, None]
        pooled = F.avg_pool1d(padded, self.before + self.after + 1, 1)[:, 0, :count]
        return torch.where(dominant[:, :count], torch.full_like(pooled, 1e300), pooled)

    def limits(self, ranks: torch.Tensor) -> torch.Tensor:
        """[Hkv, 1] the rank of the last token that stays."""
        others = self.keep - self.window
        if others == 0:
            return torch.full_like(ranks[:, :1], float("inf"))
        if not self.ada:
            return ranks.topk(others, dim=1).values[:, -1:]
        safe = min(max(0, int(self.alpha * self.keep + 1e-6) - self.window), others)
        best = ranks.sort(dim=1, descending=True).values
        floor = best[:, safe - 1 : safe] if safe else torch.full_like(best[:, :1], float("inf"))
        rest = ranks.shape[0] * (others - safe)
        layer = best[:, safe:].reshape(-1).topk(rest).values[-1] if rest else torch.full_like(floor[0, 0], float("inf"))
        return torch.minimum(floor, layer)


def wrong_lists(offsets: list[int], positions: torch.Tensor, choice: Choice, ranks: torch.Tensor, band: float) -> int:
    """Tokens of one sequence that are kept or dropped although their rank is outside the tie band around the limit, and
    places that are out of order. offsets [Hkv + 1]; positions of all lists."""
    heads, count = ranks.shape
    limits = choice.limits(ranks)
    wrong = abs(offsets[-1] - offsets[0] - heads * choice.keep)
    for head in range(heads):
        chosen = positions[offsets[head] : offsets[head + 1]].long()
        if chosen.numel() == 0 or int(chosen.min()) < 0 or int(chosen.max()) >= count + choice.window:
            return wrong + choice.keep
        kept = torch.zeros(count + choice.window, dtype=torch.bool, device=ranks.device)
        kept[chosen] = True
        wrong += int((chosen[1:] <= chosen[:-1]).sum()) + int((~kept[count:]).sum())
        kept = kept[:count]
        wrong += int((kept & (ranks[head] < limits[head] * (1.0 - band))).sum())
        wrong += int((~kept & (ranks[head] > limits[head] * (1.0 + band))).sum())
    return wrong
