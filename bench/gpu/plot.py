#!/usr/bin/env python3
"""Draws the score step's time over n from the benchmark's CSV file.

Usage: plot.py RESULTS.csv OUT.svg [--rows 32] [--step score]
"""

import argparse
import csv

import matplotlib.pyplot as plt

# Okabe and Ito's colours: distinct for colour-blind eyes too; markers tell the lines apart without colour.
LINES = {
    "naive": ("PyTorch", "#D55E00", "s"),
    "triton": ("Triton, two kernels", "#0072B2", "^"),
    "ours": ("dropkv", "#009E73", "o"),
}
FLOOR = ("reading K and V at the copy rate", "#777777")
LLAMA = {"hq": "32", "hkv": "8", "d": "128", "batch": "1"}


def read(path: str, step: str, rows: int) -> list[dict]:
    with open(path, newline="") as file:
        lines = list(csv.DictReader(file))
    wanted = LLAMA | {"step": step, "w": str(rows)}
    return [line for line in lines if all(line[name] == value for name, value in wanted.items())]


def draw(lines: list[dict], step: str, rows: int, out: str) -> None:
    plt.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "dropkv", "font.size": 11})
    figure, axes = plt.subplots(figsize=(7, 4.6), layout="constrained")
    sizes = sorted({int(line["n"]) for line in lines})
    for competitor, (label, colour, marker) in LINES.items():
        points = sorted((int(line["n"]), float(line["ms"])) for line in lines if line["competitor"] == competitor)
        if points:
            axes.plot(*zip(*points, strict=True), marker=marker, color=colour, label=label)
    floors = {int(line["n"]): float(line["ms"]) * float(line["fraction_of_floor"]) for line in lines}
    passes = "once" if step == "score given" else "twice"
    axes.plot(sizes, [floors[n] for n in sizes], "--", color=FLOOR[1], label=f"{FLOOR[0]}, {passes}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{n // 1024}K" for n in sizes])
    axes.set_xlabel("cached tokens n")
    axes.set_ylabel("milliseconds a layer")
    axes.set_title(f"DropKV score, Llama-3.1-8B layer, window {rows}", fontsize=12)
    axes.grid(True, which="both", linewidth=0.4, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(out, format="svg", metadata={"Date": None}, facecolor="white")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv")
    parser.add_argument("svg")
    parser.add_argument("--rows", type=int, default=32, help="observation rows w")
    parser.add_argument("--step", default="score", choices=["score", "score given"])
    args = parser.parse_args()
    lines = read(args.csv, args.step, args.rows)
    if not lines:
        parser.error(f"{args.csv} has no rows of step {args.step} with w = {args.rows}")
    draw(lines, args.step, args.rows, args.svg)


if __name__ == "__main__":
    main()
