"""Checks a shape: our scores, lists, kept rows and repeats, and that the peers compute the same thing."""

import torch

import check
from cases import Inputs, Shape
from ours import Buffers, Ours
from peers import naive
from peers.triton_score import TritonScore

REPEATS = 20
SELECT_BAND = 1e-5  # ranks come from the same raw scores: only the pooling rounds differently
PEER_ERROR = 0.03  # of a head's scores; weights and outputs of the peers are rounded to the cache's dtype


def tolerance(shape: Shape) -> float:
    """Relative error of a token's score: outputs enter the distance in the cache's dtype."""
    return 2.0 * torch.finfo(shape.dtype).eps


def _wrong(ours: Ours, ranks: list[torch.Tensor], band: float) -> int:
    heads = ours.shape.kv_heads
    offsets, positions = ours.buffers[0].offsets.tolist(), ours.buffers[0].positions
    wrong = 0
    for b, of_sequence in enumerate(ranks):
        lists = offsets[b * heads : (b + 1) * heads + 1]
        wrong += check.wrong_lists(lists, positions, ours.choice(b), of_sequence, band)
    return wrong


def _wrong_rows(ours: Ours, inputs: Inputs) -> int:
    """Kept rows that are not the cache's, bit for bit."""
    buffers, s = ours.buffers[0], inputs.shape
    offsets, wrong = buffers.offsets.tolist(), 0
    for i in range(s.batch * s.kv_heads):
        rows = slice(offsets[i], offsets[i + 1])
        at = buffers.positions[rows].long().clamp(0, s.tokens - 1)
        for kept, cached in ((buffers.k, inputs.k), (buffers.v, inputs.v)):
            expected = cached.view(-1, s.tokens, s.dim)[i, at]
            wrong += int((kept[rows].view(torch.int16) != expected.view(torch.int16)).any(dim=1).sum())
    return wrong


def _states(buffers: Buffers) -> list[torch.Tensor]:
    results = buffers.raw, buffers.offsets, buffers.positions, buffers.k, buffers.v
    return [result.view(torch.uint8).clone() for result in results]


def _score_errors(library, inputs: Inputs, expected, given: bool, policy: str = "dropkv") -> float:
    """Largest relative error of a token."""
    ours = Ours(library, inputs.shape, [inputs], policy=policy, given=given)
    ours.score()[0]()
    raw = ours.buffers[0].raw
    lengths = inputs.shape.all_lengths
    return check.worst(check.score_error(raw[b, :, :n], expected[b]) for b, n in enumerate(lengths))


def _select_errors(library, inputs: Inputs, policy: str) -> int:
    """The lists against our own raw scores."""
    ours = Ours(library, inputs.shape, [inputs], policy=policy)
    ours.score()[0]()
    ours.select()[0]()
    ranks = []
    for b, n in enumerate(inputs.shape.all_lengths):
        raw = ours.buffers[0].raw[b, :, :n]
        ranks.append(ours.choice(b).ranks(raw.abs().double(), raw.signbit()))
    return _wrong(ours, ranks, SELECT_BAND)


def _run_errors(library, inputs: Inputs, scores: list[check.Scores], band: float) -> tuple[int, int, int]:
    """Wrong tokens against float64, wrong rows, and repeats with other bits."""
    ours = Ours(library, inputs.shape, [inputs])
    score, run = ours.score()[0], ours.run()[0]
    score()
    run()
    ranks = [ours.choice(b).ranks(s.dropkv, s.dominant) for b, s in enumerate(scores)]
    wrong, rows = _wrong(ours, ranks, band), _wrong_rows(ours, inputs)
    first, differing = _states(ours.buffers[0]), 0
    for _ in range(REPEATS):
        score()
        run()
        same = all(torch.equal(a, b) for a, b in zip(first, _states(ours.buffers[0]), strict=True))
        differing += not same
    return wrong, rows, differing


def verify_ours(library, inputs: Inputs) -> tuple[str, bool]:
    """One line, and whether everything in it is as it should be."""
    scores = [check.reference_scores(*sequence) for sequence in inputs.sequences()]
    dropkv, snapkv = [s.dropkv for s in scores], [s.snapkv for s in scores]
    limit = tolerance(inputs.shape)
    errors = {
        "score": _score_errors(library, inputs, dropkv, False),
        "given": _score_errors(library, inputs, dropkv, True),
        "snapkv": _score_errors(library, inputs, snapkv, False, "snapkv"),
    }
    counts = {
        "select": _select_errors(library, inputs, "dropkv"),
        "ada": _select_errors(library, inputs, "adadropkv"),
    }
    counts["run"], counts["rows"], counts["repeats"] = _run_errors(library, inputs, scores, 2.0 * limit)
    good = all(error <= limit for error in errors.values()) and not any(counts.values())
    measured = [f"{name} {error:.1e}" for name, error in errors.items()] + [f"{n} {c}" for n, c in counts.items()]
    return ", ".join(measured), good


def verify_peers(inputs: Inputs, triton_score: TritonScore) -> tuple[str, bool]:
    computed, given = triton_score(inputs), triton_score.given(inputs)
    errors: dict[str, list[float]] = {"naive": [], "triton": [], "triton given": []}
    for b, (q, k, v) in enumerate(inputs.sequences()):
        expected = check.reference_scores(q, k, v).dropkv
        for name, scores in (
            ("naive", naive.dropkv(q, k, v)),
            ("triton", computed[b, :, : k.shape[1]]),
            ("triton given", given[b, :, : k.shape[1]]),
        ):
            errors[name].append(check.head_error(scores, expected))
    worst = {name: check.worst(of_sequences) for name, of_sequences in errors.items()}
    good = all(error <= PEER_ERROR for error in worst.values())
    return ", ".join(f"{name} {error:.1e}" for name, error in worst.items()), good
