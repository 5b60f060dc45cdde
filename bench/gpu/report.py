"""Rows of results, their table and their CSV file."""

import csv
import dataclasses

SHAPE_COLUMNS = ["step", "dtype", "hq", "hkv", "d", "w", "n", "batch"]
COLUMNS = [*SHAPE_COLUMNS, "competitor", "ms", "scratch_mib", "ratio_to_ours", "fraction_of_floor"]


@dataclasses.dataclass
class Row:
    step: str
    dtype: str
    hq: int
    hkv: int
    d: int
    w: int
    n: int
    batch: int
    competitor: str
    ms: float
    scratch_bytes: int
    floor_ms: float  # the bytes that the step must move, at the copy rate

    @property
    def key(self) -> tuple:
        return tuple(getattr(self, name) for name in SHAPE_COLUMNS)


class Results:
    def __init__(self):
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        self.rows.append(row)

    def ours_ms(self, row: Row) -> float | None:
        return next((r.ms for r in self.rows if r.key == row.key and r.competitor == "ours"), None)

    def write_csv(self, path: str) -> None:
        with open(path, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            for row in self.rows:
                ours = self.ours_ms(row)
                ratio = f"{row.ms / ours:.3f}" if ours else ""
                measured = [f"{row.ms:.5f}", f"{row.scratch_bytes / 2**20:.3f}", ratio, f"{row.floor_ms / row.ms:.4f}"]
                writer.writerow([*row.key, row.competitor, *measured])

    def table(self) -> str:
        """A line for every step and shape: ours, its share of the floor and its scratch, then the others."""
        names = f"{'step':<18}{'Hq/Hkv':>7}{'d':>4}{'w':>4}{'n':>7}{'B':>3}{'ours ms':>9}{'floor':>6}{'MiB':>7}"
        lines = [f"{names}  others"]
        for key in dict.fromkeys(row.key for row in self.rows):
            group = [row for row in self.rows if row.key == key]
            step, _, hq, hkv, d, w, n, batch = key
            head = f"{step:<18}{f'{hq}/{hkv}':>7}{d:>4}{w:>4}{n:>7}{batch:>3}"
            ours = next((row for row in group if row.competitor == "ours"), None)
            cells = f"{'-':>9}{'-':>6}{'-':>7}"
            if ours:
                cells = f"{ours.ms:>9.4f}{ours.floor_ms / ours.ms:>6.0%}{ours.scratch_bytes / 2**20:>7.1f}"
            lines.append(f"{head}{cells}  " + "; ".join(_cell(row, ours) for row in group if row is not ours))
        return "\n".join(lines)


def _cell(row: Row, ours: Row | None) -> str:
    ratio = f", {row.ms / ours.ms:.2f}x" if ours else ""
    return f"{row.competitor} {row.ms:.4f} ({row.floor_ms / row.ms:.0%}{ratio}, {row.scratch_bytes / 2**20:.0f} MiB)"
