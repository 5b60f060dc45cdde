"""Launches the Triton kernels with the fastest tiles of a search over sizes, warps, stages and splits."""

import concurrent.futures
import dataclasses
import functools
import itertools
import os

import torch
import triton

from peers import triton_kernels
from timing import estimate_ms

LOG2E = 1.4426950408889634
MAX_SPLITS = 256
SHARED_BYTES = 227 * 1024
ACCUMULATORS = 160  # float32 products that a thread may hold
MULTIPROCESSOR_FACTORS = (1, 2, 3, 4, 8)  # programs for every multiprocessor


@dataclasses.dataclass(frozen=True)
class Tile:
    block_m: int  # rows
    block_n: int  # tokens
    warps: int
    stages: int
    rows_first: bool = False

    def launch(self) -> dict:
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "num_warps": self.warps, "num_stages": self.stages}


def row_blocks(rows: int, dim: int, products: int) -> list[int]:
    """All rows at once or, of many, blocks of 64 and more; the score step then reads its tiles again."""
    padded = max(16, triton.next_power_of_2(rows))
    least = min(padded, 64 if products == 1 or dim == 256 else 128)
    return [size for size in (16, 32, 64, 128, 256) if least <= size <= padded and size * dim <= 256 * 128]


def tiles(rows: int, dim: int, thorough: bool, products: int) -> list[Tile]:
    """Candidates that fit in shared memory and registers; `products` 1: attend, 2: score."""
    dim = triton.next_power_of_2(dim)
    orders = (False, True) if thorough and products == 2 else (False,)
    found = []
    for block_m, block_n, warps, rows_first in itertools.product(
        row_blocks(rows, dim, products), (32, 64, 128, 256), (4, 8), orders
    ):
        held = block_n * block_m * products + (block_m * dim if products == 1 else 0)
        if held > ACCUMULATORS * 32 * warps:
            continue
        fitting = [
            stages
            for stages in (2, 3, 4)
            if 2 * (products * block_m * dim + 2 * stages * block_n * dim) <= SHARED_BYTES
        ]
        chosen = fitting if thorough else fitting[-2:][:1] if block_n in (64, 128) else []
        found += [Tile(block_m, block_n, warps, stages, rows_first) for stages in chosen]
    return found


class TritonScore:
    """Scores of one shape, [B, Hkv, tokens] float32. `sets`: inputs to search with."""

    def __init__(self, shape, sets, thorough: bool):
        self.shape = shape
        self.rows = shape.group * shape.rows
        self.lists = shape.batch * shape.kv_heads
        self.sizes = {"ROWS": self.rows, "W": shape.rows, "D": shape.dim, "D_PAD": triton.next_power_of_2(shape.dim)}
        self.scale2 = shape.scale * LOG2E
        self._search(sets, thorough)

    def tiles(self) -> str:
        """What the search chose."""
        found = ((self.attend_tile, self.splits), (self.score_tile, self.chunks))
        tiles = [f"{t.block_m}x{t.block_n}, {t.warps} warps, {t.stages} stages, {count} parts" for t, count in found]
        return f"attend {tiles[0]}; score {tiles[1]}{', rows first' if self.score_tile.rows_first else ''}"

    def __call__(self, inputs) -> torch.Tensor:
        out, lse = self.attend(inputs)
        return self.score(inputs, out, lse)

    def given(self, inputs) -> torch.Tensor:
        return self.score(inputs, inputs.out, inputs.lse)

    def attend(self, inputs, tile: Tile | None = None, splits: int | None = None, warmup: bool = False):
        tile, splits = tile or self.attend_tile, splits or self.splits
        s, q = self.shape, inputs.q
        split_tokens = triton.cdiv(triton.cdiv(s.tokens, splits), tile.block_n) * tile.block_n
        splits = triton.cdiv(s.tokens, split_tokens)
        tops = torch.empty(self.lists, splits, self.rows, dtype=torch.float32, device=q.device)
        totals = torch.empty_like(tops)
        parts = torch.empty(*tops.shape, s.dim, dtype=torch.float32, device=q.device)
        out, lse = torch.empty_like(q), torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        kernel, grid = triton_kernels.attend_kernel, (splits, self.lists, triton.cdiv(self.rows, tile.block_m))
        tensors = q, inputs.k, inputs.v, inputs.lengths, tops, totals, parts
        numbers = self.scale2, s.tokens, split_tokens, s.kv_heads
        if warmup:
            return kernel.warmup(*tensors, *numbers, grid=grid, **self.sizes, **tile.launch())
        kernel[grid](*tensors, *numbers, **self.sizes, **tile.launch())
        sizes = {name: self.sizes[name] for name in ("ROWS", "D", "D_PAD")}
        triton_kernels.merge_kernel[(self.rows, self.lists)](
            tops, totals, parts, out, lse, splits, **sizes, MAX_SPLITS=MAX_SPLITS, BLOCK_S=16, num_warps=4
        )
        return out, lse

    def score(self, inputs, out, lse, tile: Tile | None = None, chunks: int | None = None, warmup: bool = False):
        tile, chunks = tile or self.score_tile, chunks or self.chunks
        s, q = self.shape, inputs.q
        chunk_tokens = triton.cdiv(triton.cdiv(s.tokens, chunks), tile.block_n) * tile.block_n
        scores = torch.empty(s.batch, s.kv_heads, s.tokens, dtype=torch.float32, device=q.device)
        kernel, grid = triton_kernels.score_kernel, (triton.cdiv(s.tokens, chunk_tokens), self.lists)
        arguments = q, inputs.k, inputs.v, out, lse, inputs.lengths, scores, self.scale2, s.tokens, chunk_tokens
        names = {**self.sizes, **tile.launch(), "ROWS_FIRST": tile.rows_first}
        if warmup:
            return kernel.warmup(*arguments, s.kv_heads, grid=grid, **names)
        kernel[grid](*arguments, s.kv_heads, **names)
        return scores

    def _counts(self, tile: Tile) -> list[int]:
        """Numbers of splits worth trying: whole waves of programs, none without a tile of its own."""
        programs = self.lists * triton.cdiv(self.rows, tile.block_m)
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        most = min(MAX_SPLITS, triton.cdiv(self.shape.tokens, tile.block_n))
        return sorted({max(1, min(most, factor * processors // programs)) for factor in MULTIPROCESSOR_FACTORS})

    def _search(self, sets, thorough: bool) -> None:
        attend_tiles = tiles(self.rows, self.shape.dim, thorough, 1)
        score_tiles = tiles(self.rows, self.shape.dim, thorough, 2)
        first = sets[0]
        pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
        with pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for tile in attend_tiles:
                self.attend(first, tile, 1, warmup=True)
            for tile in score_tiles:
                self.score(first, first.out, first.lse, tile, 1, warmup=True)

        def score(inputs, tile: Tile, chunks: int):
            return self.score(inputs, inputs.out, inputs.lse, tile, chunks)

        self.attend_tile, self.splits = self._fastest(sets, attend_tiles, self.attend)
        self.score_tile, self.chunks = self._fastest(sets, score_tiles, score)

    def _fastest(self, sets, candidates: list[Tile], launch) -> tuple[Tile, int]:
        best_ms, best = float("inf"), None
        for tile in candidates:
            for count in self._counts(tile):
                calls = [functools.partial(launch, inputs, tile, count) for inputs in sets[:4]]
                try:
                    ms = estimate_ms(calls, rounds=3)
                except (triton.errors.TritonError, RuntimeError):  # does not compile, or takes too much
                    break
                if ms < best_ms:
                    best_ms, best = ms, (tile, count)
        if best is None:
            raise RuntimeError(f"no tile of the search fits rows {self.rows}, d {self.shape.dim}")
        return best
