#!/usr/bin/env python3
"""Does the answer survive? One planted fact in each of N documents, asked for with the full cache and after evictions.

Usage: answers.py --model FILE.gguf [--binary build/release/dropkv] [--seeds 1-10] [--words 2500] [--markdown FILE]

Documents, facts and depths come from make_document.py and its seeds alone; the question is seen. Every answer is reported.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
POLICIES = ["adadropkv", "dropkv", "snapkv"]
BUDGETS = ["10%", "5%"]


def make_document(folder: pathlib.Path, seed: int, words: int) -> dict:
    text, meta = folder / "document.txt", folder / "meta.json"
    depth = (seed * 7 % 10 + 0.5) / 10  # every tenth of the document once in ten seeds
    command = [sys.executable, HERE / "make_document.py", "--seed", seed, "--depth", depth, "--words", words]
    subprocess.run([str(c) for c in [*command, "--out", text, "--meta", meta]], check=True)
    return json.loads(meta.read_text()) | {"file": str(text)}


def run(args: argparse.Namespace, document: dict) -> dict:
    command = [args.binary, "run", "-m", args.model, "-f", document["file"], "-p", document["question"]]
    command += ["--prefix", document["answer_prefix"], "--expect", document["answer"]]
    command += ["--policy", POLICIES[0], "--compare", ",".join(["full", *POLICIES[1:]])]
    command += ["--budget", ",".join(BUDGETS), "--max-tokens", "24", "--json", *args.flags]
    done = subprocess.run([str(c) for c in command], check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def table(columns: list, rows: list) -> str:
    """Markdown: one line a document, then the counts."""
    lines = ["| seed | depth | tokens | answer | " + " | ".join(columns) + " |", "| --- " * (4 + len(columns)) + "|"]
    for row in rows:
        cells = ["right" if row["verdicts"][c] == "right" else "wrong: " + row["texts"][c] for c in columns]
        lines.append(f"| {row['seed']} | {row['depth']:.2f} | {row['tokens']} | {row['answer']} | {' | '.join(cells)} |")
    right = [f"**{sum(row['verdicts'][c] == 'right' for row in rows)} of {len(rows)}**" for c in columns]
    kept = [row for row in rows if row["verdicts"][columns[0]] == "right"]
    of_full = [f"{sum(row['verdicts'][c] == 'right' for row in kept)} of {len(kept)}" for c in columns]
    lines.append("| | | | all | " + " | ".join(right) + " |")
    lines.append("| | | | where the full cache is right | " + " | ".join(of_full) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--binary", default=HERE.parent / "build/release/dropkv")
    parser.add_argument("--seeds", default="1-10", help="FIRST-LAST")
    parser.add_argument("--words", type=int, default=2500)
    parser.add_argument("--markdown", type=pathlib.Path, help="also write the table there")
    parser.add_argument("flags", nargs="*", help="behind --: further flags of dropkv run")
    args = parser.parse_args()
    first, last = (int(seed) for seed in args.seeds.split("-"))
    columns, rows, model = [], [], ""
    for seed in range(first, last + 1):
        with tempfile.TemporaryDirectory() as folder:
            document = make_document(pathlib.Path(folder), seed, args.words)
            result = run(args, document)
        model = result["model"]
        names = [f"{r['policy']} {r['budget']}" for r in result["runs"]]
        columns = names
        texts = {name: " ".join(r["text"].split())[:60] for name, r in zip(names, result["runs"])}
        verdicts = {name: r["verdict"] for name, r in zip(names, result["runs"])}
        rows.append({"seed": seed, "depth": document["depth"], "tokens": result["prompt_tokens"],
                     "answer": document["answer"], "texts": texts, "verdicts": verdicts})
        print(f"seed {seed}: {document['answer']}: " + ", ".join(f"{n} {v}" for n, v in verdicts.items()), flush=True)
    text = f"{model}, {args.words} words a document, seeds {args.seeds}\n\n" + table(columns, rows)
    print("\n" + text)
    if args.markdown:
        args.markdown.write_text(text)


if __name__ == "__main__":
    main()
