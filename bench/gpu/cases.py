"""Shapes and their random inputs."""

import dataclasses
import math

import torch

from check import attention_state


@dataclasses.dataclass(frozen=True)
class Shape:
    """One layer. Defaults: Llama-3.1-8B."""

    tokens: int
    rows: int = 32  # w
    kv_heads: int = 8
    group: int = 4  # g
    dim: int = 128  # d
    lengths: tuple[int, ...] = ()  # of a padded batch; empty: one sequence of `tokens`
    content: str = "random"  # "dominant": a key for every row that holds 1/2 to 1 of it; "sink": key 0 draws all rows
    dtype: torch.dtype = torch.bfloat16

    @property
    def query_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def all_lengths(self) -> tuple[int, ...]:
        return self.lengths or (self.tokens,)

    @property
    def batch(self) -> int:
        return len(self.all_lengths)

    @property
    def key_bytes(self) -> int:
        """Keys of all sequences; values take as much."""
        return sum(self.all_lengths) * self.kv_heads * self.dim * self.dtype.itemsize

    @property
    def score_bytes(self) -> int:
        return sum(self.all_lengths) * self.kv_heads * 4

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.dim)

    def allocated_bytes(self) -> int:
        return 2 * self.batch * self.kv_heads * self.tokens * self.dim * self.dtype.itemsize


class Inputs:
    """q [B, Hq, w, d], k and v [B, Hkv, tokens, d], lengths [B]; as of a prefill: lse [B, Hq, w], out [B, Hq, w, d]."""

    def __init__(self, shape: Shape, generator: torch.Generator, device: str = "cuda"):
        self.shape = shape

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float32, device=device)

        q = normal(shape.batch, shape.query_heads, shape.rows, shape.dim)
        k = normal(shape.batch, shape.kv_heads, shape.tokens, shape.dim)
        if shape.content == "dominant":
            self._favour_rows(q, k)
        elif shape.content == "sink":
            self._add_sink(q, k, normal)
        self.q, self.k = q.to(shape.dtype), k.to(shape.dtype)
        self.v = normal(shape.batch, shape.kv_heads, shape.tokens, shape.dim).to(shape.dtype)
        self.lengths = torch.tensor(shape.all_lengths, dtype=torch.int32, device=device)
        states = [attention_state(*sequence) for sequence in self.sequences()]
        self.lse = torch.stack([lse for lse, _ in states]).float()
        self.out = torch.stack([out for _, out in states]).to(shape.dtype)

    def sequences(self):
        """q [Hq, w, d], k and v [Hkv, n, d] of every sequence."""
        for b, n in enumerate(self.shape.all_lengths):
            yield self.q[b], self.k[b, :, :n], self.v[b, :, :n]

    def _favour_rows(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """Every row finds one key with its own direction; the gap to the others' sum grows from row to row."""
        s = self.shape
        count = s.group * s.rows
        rows = q.view(s.batch, s.kv_heads, count, s.dim)
        gap = (torch.arange(count, device=q.device) % 16) * 1.05
        for b, n in enumerate(s.all_lengths):
            logit = math.log(n) + 0.5 + gap
            length = logit[:, None] / s.scale / rows[b].square().sum(-1, keepdim=True)
            at = torch.arange(count, device=q.device) * ((n - s.rows) // count)
            k[b, :, at] = rows[b] * length

    def _add_sink(self, q: torch.Tensor, k: torch.Tensor, normal) -> None:
        """All rows of a KV head share a direction, and key 0 has it: it draws about two thirds to nine tenths."""
        s = self.shape
        common = normal(s.batch, s.kv_heads, s.dim)
        common *= math.sqrt(s.dim) / common.norm(dim=-1, keepdim=True)
        q += common.repeat_interleave(s.group, 1)[:, :, None]
        for b, n in enumerate(s.all_lengths):
            k[b, :, 0] = common[b] * ((math.log(n) + 2.5) / math.sqrt(s.dim))


def generator_of(seed: int, device: str = "cuda") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)
