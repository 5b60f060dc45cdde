"""What is timed: every step with its competitors, on one shape."""

import dataclasses

import torch
import triton

import library as abi
import timing
import verify
from cases import Inputs, Shape, generator_of
from ours import Ours
from peers import naive
from peers.triton_score import TritonScore
from report import Results, Row

FRACTION = 0.05
POOL = (5, 5)  # of preset dropkv: mean 11
ERRORS = (RuntimeError, triton.errors.TritonError)


def describe(shape: Shape) -> str:
    heads = f"{shape.query_heads}/{shape.kv_heads}"
    return f"{heads} d {shape.dim} w {shape.rows} n {shape.tokens} B {shape.batch} {shape.content}"


class Bench:
    """One run: the library (None: peers only), the copy rate, results and failures."""

    def __init__(self, library: abi.Library | None, rate: float, seed: int, thorough: bool):
        self.library, self.rate, self.seed, self.thorough = library, rate, seed, thorough
        self.results, self.failures, self.checks = Results(), [], 0

    def inputs(self, shape: Shape, count: int = 0) -> list[Inputs]:
        """Sets to rotate among, or `count`; every set of a run has other numbers."""
        sets = []
        for _ in range(count or timing.input_sets(shape.allocated_bytes())):
            self.seed += 1
            sets.append(Inputs(shape, generator_of(self.seed)))
        return sets

    def fail(self, what: str, why) -> None:
        self.failures.append(f"{what}: {why}")
        print(f"FAILED {what}: {why}", flush=True)

    def time(self, step: str, shape: Shape, competitor: str, make_calls, floor_bytes: int, scratch=None, how=None):
        """Adds a row. make_calls() gives one call for every set; scratch() its bytes where PyTorch cannot know them."""
        try:
            calls = make_calls()
            used = scratch() if scratch else timing.scratch_bytes(calls[0])
            ms = how(calls[0]) if how else timing.median_ms(calls)
        except ERRORS as error:
            self.fail(f"{step} {competitor} {describe(shape)}", error)
            return
        finally:
            torch.cuda.empty_cache()
        name = str(shape.dtype).removeprefix("torch.")
        sizes = shape.query_heads, shape.kv_heads, shape.dim, shape.rows, shape.tokens, shape.batch
        floor_ms = floor_bytes / self.rate * 1e3
        self.results.add(Row(step, name, *sizes, competitor, ms, used, floor_ms))

    def check(self, shape: Shape, verified) -> None:
        """verified() gives a line and whether all is well."""
        self.checks += 1
        try:
            line, good = verified()
        except ERRORS as error:
            self.fail(f"check {describe(shape)}", error)
            return
        print(f"{'ok    ' if good else 'WRONG '} {describe(shape)}: {line}", flush=True)
        if not good:
            self.failures.append(f"check {describe(shape)}: {line}")

    def ours(self, shape: Shape, sets: list[Inputs], **options) -> Ours | None:
        """None without a library, or where it refuses the shape."""
        if self.library is None:
            return None
        try:
            return Ours(self.library, shape, sets, fraction=FRACTION, **options)
        except ERRORS as error:
            self.fail(f"plan {describe(shape)} {options}", error)
            return None


def keep_of(shape: Shape) -> int:
    return max(int(FRACTION * shape.tokens + 1e-6), shape.rows)


def each(sets: list[Inputs], call):
    """make_calls for a function of one set of inputs."""
    return lambda: [lambda inputs=inputs: call(inputs) for inputs in sets]


def check_contents(bench: Bench, shape: Shape) -> None:
    """Our results on random keys, on keys that dominate a row, and with an attention sink."""
    for content in ("random", "dominant", "sink") if bench.library else ():
        varied = dataclasses.replace(shape, content=content)
        bench.check(varied, lambda varied=varied: verify.verify_ours(bench.library, bench.inputs(varied, 1)[0]))


def time_scores(bench: Bench, shape: Shape, sets: list[Inputs], grouped: bool) -> TritonScore | None:
    """Score step with lse and out computed, and handed in."""
    one, two = 2 * shape.key_bytes, 4 * shape.key_bytes
    triton_score = None
    try:
        triton_score = TritonScore(shape, sets, bench.thorough)
        bench.check(shape, lambda: verify.verify_peers(sets[0], triton_score))
    except ERRORS as error:
        bench.fail(f"triton {describe(shape)}", error)

    def given(inputs: Inputs, grouped: bool):
        return [
            naive.dropkv_given(*sequence, inputs.lse[b], inputs.out[b], grouped)
            for b, sequence in enumerate(inputs.sequences())
        ]

    def computed(inputs: Inputs, grouped: bool):
        return [naive.dropkv(*sequence, grouped) for sequence in inputs.sequences()]

    for name, flag in (("naive", False), ("naive grouped", True))[: 2 if grouped else 1]:
        bench.time("score", shape, name, each(sets, lambda i, flag=flag: computed(i, flag)), two)
        bench.time("score given", shape, name, each(sets, lambda i, flag=flag: given(i, flag)), one)
    if triton_score:
        print(f"tiles  {describe(shape)}: {triton_score.tiles()}", flush=True)
        bench.time("score", shape, "triton", each(sets, triton_score), two)
        bench.time("score given", shape, "triton", each(sets, triton_score.given), one)
    for step, floor, handed in (("score", two, False), ("score given", one, True)):
        time_our_score(bench, step, shape, sets, floor, given=handed)
    time_our_score(bench, "score ahead", shape, sets, two, ahead=True)
    return triton_score


def time_our_score(bench: Bench, step: str, shape: Shape, sets: list[Inputs], floor: int, **options) -> None:
    ours = bench.ours(shape, sets, **options)
    if ours:
        bench.time(step, shape, "ours", ours.score, floor, workspace_of(ours))
        print(f"kernels {step} {describe(shape)}: {ours.plan.kernels()}", flush=True)


def time_sink(bench: Bench, shape: Shape) -> None:
    """The computed score where an attention sink makes one token of every row dominant, as in real models."""
    varied = dataclasses.replace(shape, content="sink")
    sets = bench.inputs(varied)
    time_our_score(bench, "score sink", varied, sets, 4 * shape.key_bytes)


def time_selection(bench: Bench, shape: Shape, sets: list[Inputs]) -> None:
    """Pool, select and compact; one sequence. The scores have just been written, so they may be in L2 here as there."""
    keep, window = keep_of(shape), shape.rows
    raws = [naive.dropkv(*next(inputs.sequences())) for inputs in sets]
    pooled = [naive.pool_mean(raw, *POOL) for raw in raws]
    numbers = range(len(sets))
    floor, chosen = shape.score_bytes, (keep, window, *POOL)

    def calls(function):
        return lambda: [lambda i=i: function(i) for i in numbers]

    bench.time("select", shape, "torch.topk", calls(lambda i: naive.top_past(pooled[i], keep, window)), floor)
    bench.time("select", shape, "torch pool+topk+sort", calls(lambda i: naive.select(raws[i], *chosen)), floor)
    bench.time("select ada", shape, "torch", calls(lambda i: naive.select_ada(raws[i], *chosen)), floor)
    for step, policy in (("select", "dropkv"), ("select ada", "adadropkv")):
        ours = bench.ours(shape, sets, policy=policy)
        if ours:
            bench.time(step, shape, "ours", lambda ours=ours: scored(ours).select(), floor, workspace_of(ours))

    kept = [naive.select(raw, *chosen) for raw in raws]
    moved = 2 * 2 * shape.kv_heads * keep * shape.dim * shape.dtype.itemsize
    for name, function in (("torch gather", naive.gather), ("torch index_select", naive.index_select)):
        make = calls(lambda i, function=function: function(sets[i].k[0], sets[i].v[0], kept[i]))
        bench.time("compact", shape, name, make, moved)
    ours = bench.ours(shape, sets)
    if ours:
        bench.time("compact", shape, "ours", lambda: selected(ours).compact(), moved, workspace_of(ours))


def time_in_place(bench: Bench, shape: Shape, sets: list[Inputs]) -> None:
    """Compaction inside the cache: the sets are of no use afterwards."""
    ours = bench.ours(shape, sets)
    if ours:
        moved = 2 * ours.kept_bytes()
        make = lambda: selected(ours).compact(abi.COMPACT_IN_PLACE)  # noqa: E731
        bench.time("compact in place", shape, "ours", make, moved, workspace_of(ours))


def workspace_of(ours: Ours):
    return lambda: ours.plan.workspace_bytes


def scored(ours: Ours) -> Ours:
    for call in ours.score():
        call()
    return ours


def selected(ours: Ours) -> Ours:
    for call in scored(ours).select():
        call()
    return ours


def time_whole(bench: Bench, shape: Shape, sets: list[Inputs], triton_score: TritonScore | None) -> None:
    """Score, pool, select and compact; the peers only for one sequence."""
    keep, window = keep_of(shape), shape.rows

    def rest(inputs: Inputs, raw: torch.Tensor):
        positions = naive.select(raw, keep, window, *POOL)
        return positions, naive.index_select(inputs.k[0], inputs.v[0], positions)

    ours = bench.ours(shape, sets)
    kept = sum(max(int(FRACTION * n + 1e-6), window) for n in shape.all_lengths)
    floor = 4 * shape.key_bytes + 4 * kept * shape.kv_heads * shape.dim * shape.dtype.itemsize
    if shape.batch == 1:
        make = each(sets, lambda inputs: rest(inputs, naive.dropkv(*next(inputs.sequences()))))
        bench.time("whole step", shape, "naive + torch", make, floor)
        if triton_score:
            make = each(sets, lambda inputs: rest(inputs, triton_score(inputs)[0]))
            bench.time("whole step", shape, "triton + torch", make, floor)
    if ours:
        bench.time("whole step", shape, "ours", ours.run, floor, workspace_of(ours))
        one = "ours, one graph launch"
        bench.time("whole step", shape, one, ours.run, floor, workspace_of(ours), how=timing.launch_ms)


def time_methods(bench: Bench, shape: Shape, sets: list[Inputs]) -> None:
    """Scores of other eviction methods beside DropKV's. Floor: two passes over what the method reads."""
    keys, both = 2 * shape.key_bytes, 4 * shape.key_bytes
    hidden = shape.query_heads * shape.dim
    weight = torch.randn(shape.query_heads, shape.dim, hidden, device="cuda") / hidden**0.5
    weight = weight.to(shape.dtype)
    methods = {
        "naive": (both, naive.dropkv),
        "naive snapkv": (keys, lambda q, k, v: naive.snapkv(q, k)),
        "naive criticalkv": (both, lambda q, k, v: naive.criticalkv(q, k, v, weight, keep_of(shape))),
        "naive andpro": (both, naive.andpro),
        "naive caote": (both, naive.caote),
    }
    for name, (floor, method) in methods.items():
        bench.time("methods", shape, name, each(sets, lambda i, m=method: m(*next(i.sequences()))), floor)
    for name, policy, floor in (("ours", "dropkv", both), ("ours snapkv", "snapkv", keys)):
        ours = bench.ours(shape, sets, policy=policy)
        if ours:
            bench.time("methods", shape, name, ours.score, floor, workspace_of(ours))
