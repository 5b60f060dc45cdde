"""Decode attention over the kept cache: uniform and ragged lists, and PyTorch's on the same bytes."""

import dataclasses
import itertools

import torch

import library as abi
import timing
from cases import Shape, generator_of
from ours import kept_cache
from peers import decode
from steps import ERRORS, Bench, describe

TOLERANCE = 2.0  # times the dtype's epsilon times the largest output


@dataclasses.dataclass
class Step:
    """q [B, Hq, d]; k and v [total, d]: list i is rows offsets[i] .. offsets[i + 1]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def list_lengths(count: int, mean: int, ragged: bool) -> list[int]:
    """Uniform, or 0.2 to 1.8 times the mean, in an order that puts long beside short."""
    if not ragged:
        return [mean] * count
    spread = [int(mean * (0.2 + 1.6 * i / (count - 1))) for i in range(count)]
    return [spread[i * 37 % count] for i in range(count)]  # 37: prime to every count that is used


def expected(step: Step, lengths: list[int]) -> torch.Tensor:
    """float64 [B, Hq, d]."""
    rows = step.q.double().view(len(lengths), -1, step.q.shape[-1])
    lists = zip(rows, step.k.split(lengths), step.v.split(lengths), strict=True)
    outs = [torch.softmax(q @ k.double().T / q.shape[-1] ** 0.5, 1) @ v.double() for q, k, v in lists]
    return torch.stack(outs).view(step.q.shape)


class Lists:
    """Inputs of one batch of lists, and the calls of everyone who attends to them."""

    def __init__(self, bench: Bench, shape: Shape, lengths: list[int]):
        self.bench, self.shape, self.lengths = bench, shape, lengths
        self.offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int64, device="cuda")
        self.bytes = 2 * sum(lengths) * shape.dim * shape.dtype.itemsize
        self.steps = [self._step() for _ in range(timing.input_sets(self.bytes))]

    def _step(self) -> Step:
        self.bench.seed += 1
        generator, s = generator_of(self.bench.seed), self.shape
        sizes = (s.batch, s.query_heads, s.dim), (sum(self.lengths), s.dim), (sum(self.lengths), s.dim)
        return Step(*(torch.randn(size, generator=generator, device="cuda").to(s.dtype) for size in sizes))

    def ours(self) -> list:
        library, s = self.bench.library, self.shape
        arguments = s, len(self.lengths), max(self.lengths)
        caches = [kept_cache(*arguments, step.k, step.v, self.offsets) for step in self.steps]
        self.space = abi.workspace(library.get("dropkv_cuda_decode_workspace_bytes", caches[0], s.query_heads))
        library.call("dropkv_cuda_decode_prepare", self.space.data_ptr(), abi.stream())
        self.outs = [torch.full_like(step.q, float("nan")) for step in self.steps]

        def call(i: int):
            library.decode(caches[i], s.query_heads, self.steps[i].q, self.outs[i], s.scale, self.space)

        return [lambda i=i: call(i) for i in range(len(self.steps))]

    def scratch_bytes(self) -> int:
        """Of our last calls."""
        return self.space.numel()

    def sdpa(self) -> tuple[str, list]:
        """Fastest way over the padded cache, chosen on the first set."""
        multiple = 1 if min(self.lengths) == max(self.lengths) else 64
        batch, lengths = self.shape.batch, self.lengths
        pads = [[decode.padded(x, lengths, batch, multiple) for x in (step.k, step.v)] for step in self.steps]
        sdpa = decode.Sdpa(self.steps[0].q, *pads[0], self.lengths, timing.estimate_ms)
        pairs = zip(self.steps, pads, strict=True)
        return sdpa.name(), [lambda q=step.q, k=k, v=v: sdpa.run(q, k, v) for step, (k, v) in pairs]

    def varlen(self) -> list:
        packed = decode.Varlen(self.shape.group, self.lengths)
        return [lambda step=step: packed.run(step.q, step.k, step.v) for step in self.steps]

    def verify(self, name: str, out: torch.Tensor) -> tuple[str, bool]:
        want = expected(self.steps[0], self.lengths)
        error = float((out.double().reshape(want.shape) - want).abs().max())
        return f"{name} {error:.1e}", error <= TOLERANCE * torch.finfo(self.shape.dtype).eps * float(want.abs().max())


def time_decode(bench: Bench, batch: int, kept: int, ragged: bool) -> None:
    """`kept` tokens per list on average."""
    shape = Shape(tokens=kept, rows=1, lengths=(kept,) * batch)
    name = "decode ragged" if ragged else "decode uniform"
    lists = Lists(bench, shape, list_lengths(batch * shape.kv_heads, kept, ragged))
    if bench.library:

        def checked():
            lists.ours()[0]()
            return lists.verify(name, lists.outs[0])

        bench.check(shape, checked)
        bench.time(name, shape, "ours", lists.ours, lists.bytes, lists.scratch_bytes)
    try:
        way, calls = lists.sdpa()
        bench.check(shape, lambda: lists.verify(f"{name} {way}", calls[0]()))
        bench.time(name, shape, way, lambda: calls, lists.bytes)
    except ERRORS as error:
        bench.fail(f"{name} sdpa {describe(shape)}", error)
    bench.check(shape, lambda: lists.verify(f"{name} torch varlen", lists.varlen()[0]()))
    bench.time(name, shape, "torch varlen", lists.varlen, lists.bytes)


def time_full_cache(bench: Bench, batch: int, tokens: int, kept: int) -> None:
    """sdpa over the full cache, under the kept cache's key: what decoding costs without eviction."""
    shape = Shape(tokens=kept, rows=1, lengths=(kept,) * batch)
    lists = Lists(bench, Shape(tokens=tokens, rows=1, lengths=(tokens,) * batch), [tokens] * batch * shape.kv_heads)
    try:
        way, calls = lists.sdpa()
        bench.time("decode uniform", shape, f"full cache, {way}", lambda: calls[:1], lists.bytes)
    except ERRORS as error:
        bench.fail(f"full cache sdpa {describe(shape)}", error)
