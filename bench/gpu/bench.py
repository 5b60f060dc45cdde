#!/usr/bin/env python3
"""Checks and times every step of dropkv on this GPU beside its peers, in one run.

Usage: bench.py [--lib libdropkv_cuda.so] [--quick] [--csv OUT.csv] [--steps score,select,...] [--tokens 4096,...]

README.md says what is measured and how. Without --lib the peers alone are timed. Exit status 1: a check or a
measurement failed; the last lines say which.
"""

import argparse
import dataclasses
import gc
import random
import sys
import time

import torch

import decode_steps
import steps
import timing
from cases import Shape
from library import Library

STEPS = ["check", "score", "select", "whole", "methods", "shapes", "decode"]
TOKENS = [4096, 8192, 16384, 32768, 65536, 131072]
QUICK_TOKENS = [4096, 131072]
SHAPE_TOKENS = 32768
BATCH = (0.3, 0.55, 0.8, 1.0)  # lengths of the ragged batch, times SHAPE_TOKENS
DECODE_TOKENS, DECODE_BATCH = 131072, 8

# Beside the Llama shape: g = 1, 6, 7 (Qwen2.5-7B) and 8 (Llama-3.1-70B), other head sizes, other windows.
HEADS = [{"kv_heads": heads, "group": group} for heads, group in ((32, 1), (8, 6), (4, 7), (8, 8))]
OTHERS = [*HEADS, *({"dim": dim} for dim in (64, 80, 96, 256)), *({"rows": rows} for rows in (16, 64))]
QUICK_OTHERS = [HEADS[2], {"dim": 80}, {"rows": 64}]


def llama(bench: steps.Bench, shape: Shape, wanted: set[str]) -> None:
    if "check" in wanted:
        steps.check_contents(bench, shape)
    if not wanted & {"score", "select", "whole", "methods"}:
        return
    sets = bench.inputs(shape)
    triton_score = steps.time_scores(bench, shape, sets, grouped=True) if wanted & {"score", "whole"} else None
    if "score" in wanted and shape.tokens >= SHAPE_TOKENS:
        steps.time_sink(bench, shape)
    if "whole" in wanted:
        steps.time_whole(bench, shape, sets, triton_score)
    if "methods" in wanted:
        steps.time_methods(bench, shape, sets)
    if "select" in wanted:
        steps.time_selection(bench, shape, sets)
        steps.time_in_place(bench, shape, sets)


def other(bench: steps.Bench, shape: Shape, wanted: set[str]) -> None:
    if "check" in wanted:
        steps.check_contents(bench, shape)
    sets = bench.inputs(shape)
    steps.time_scores(bench, shape, sets, grouped=False)
    steps.time_whole(bench, shape, sets, None)


def run_steps(bench: steps.Bench, args: argparse.Namespace, wanted: set[str], save) -> None:
    for rows in (32, 8):
        for tokens in args.tokens:
            left_out = {"methods"} if tokens < max(args.tokens) or (args.quick and rows != 8) else set()
            llama(bench, Shape(tokens=tokens, rows=rows), wanted - left_out)
            save()
    if "shapes" in wanted:
        bench.thorough = False
        base = Shape(tokens=SHAPE_TOKENS)
        shapes = [dataclasses.replace(base, **changes) for changes in (QUICK_OTHERS if args.quick else OTHERS)]
        shapes.append(dataclasses.replace(base, lengths=tuple(int(part * SHAPE_TOKENS) for part in BATCH)))
        for shape in shapes:
            other(bench, shape, wanted)
            save()
    if "decode" in wanted:
        kept = int(steps.FRACTION * DECODE_TOKENS)
        for batch, ragged in ((DECODE_BATCH, False), (DECODE_BATCH, True), (1, False)):
            decode_steps.time_decode(bench, batch, kept, ragged)
            gc.collect()
        if not args.quick:
            decode_steps.time_full_cache(bench, DECODE_BATCH, DECODE_TOKENS, kept)
        save()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lib", help="libdropkv_cuda.so; without it the peers alone are timed")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and shapes, a smaller search for Triton")
    parser.add_argument("--csv", help="also write the results there")
    parser.add_argument("--steps", default=",".join(STEPS), help="of: " + ", ".join(STEPS))
    parser.add_argument("--tokens", help="n of the Llama shape")
    parser.add_argument("--seed", type=int, help="default: a fresh one")
    args = parser.parse_args()
    unknown = set(args.steps.split(",")) - set(STEPS)
    if unknown:
        parser.error(f"--steps: {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    default = QUICK_TOKENS if args.quick else TOKENS
    args.tokens = [int(n) for n in args.tokens.split(",")] if args.tokens else default
    args.seed = random.SystemRandom().randrange(2**40) if args.seed is None else args.seed
    return args


def main() -> int:
    args = parse()
    began = time.monotonic()
    library = Library(args.lib) if args.lib else None
    rate = timing.copy_rate()
    name = torch.cuda.get_device_name()
    print(f"{name}, copy {rate / 1e12:.3f} TB/s, PyTorch {torch.__version__}, seed {args.seed}", flush=True)
    bench = steps.Bench(library, rate, args.seed, not args.quick)

    def save():
        gc.collect()
        if args.csv:
            bench.results.write_csv(args.csv)

    try:
        run_steps(bench, args, set(args.steps.split(",")), save)
    finally:
        save()
        print(bench.results.table())
    print(f"{name}, copy {rate / 1e12:.3f} TB/s before, {timing.copy_rate() / 1e12:.3f} TB/s after")
    print(f"{bench.checks} checks, {len(bench.results.rows)} measurements, {time.monotonic() - began:.0f} s")
    for failure in bench.failures:
        print(f"FAILED {failure}")
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
