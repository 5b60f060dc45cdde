#!/usr/bin/env python3
"""Checks the sources: format (clang-format), shell (shellcheck), tidy (clang-tidy).

Usage: lint.py [--fix] [--build DIR] [--seconds N] {format,shell,tidy}...

tidy takes the compile commands of a build folder. What passed is remembered by content (source, every header of this
tree that it includes, command, settings) in the cache folder, so only what changed is checked again. With --seconds
it starts no file after that time and says which ones it left.
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
CXX = {".h", ".cc", ".c", ".cu", ".cuh"}
TIDY_FOLDERS = ("src", "examples")


def tracked() -> list[pathlib.Path]:
    """Files of the tree that git knows or would add; without git, all but the build folder."""
    git = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(git, capture_output=True, text=True)
    if listing.returncode == 0:
        files = [ROOT / name for name in listing.stdout.split("\0") if name]
    else:
        files = [p for p in ROOT.rglob("*") if "build" not in p.relative_to(ROOT).parts]
    return sorted(p for p in files if p.is_file())


def check_format(fix: bool) -> bool:
    sources = [str(p) for p in tracked() if p.suffix in CXX]
    flags = ["-i"] if fix else ["--dry-run", "-Werror"]
    return subprocess.run(["clang-format", *flags, *sources]).returncode == 0


def check_shell() -> bool:
    scripts = [str(p) for p in tracked() if p.suffix == ".sh" or p == ROOT / ".ci" / "run"]
    return subprocess.run(["shellcheck", *scripts]).returncode == 0


def cache_folder() -> pathlib.Path:
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(os.environ.get("DROPKV_CACHE") or pathlib.Path(base) / "dropkv") / "tidy"


def headers_by_object(build: pathlib.Path) -> dict[str, list[pathlib.Path]]:
    """Object file -> the files of this tree that went into it, as ninja recorded them."""
    listing = subprocess.run(["ninja", "-C", str(build), "-t", "deps"], capture_output=True, text=True, check=True)
    deps, current = {}, []
    for line in listing.stdout.splitlines():
        if line.startswith("    "):
            path = (build / line.strip()).resolve()
            if path.is_relative_to(ROOT):
                current.append(path)
        elif ": #deps" in line:
            current = deps.setdefault(line.split(": #deps")[0], [])
    return deps


def tidy_key(entry: dict, headers: list[pathlib.Path]) -> str:
    digest = hashlib.sha256()
    digest.update((ROOT / ".clang-tidy").read_bytes())
    digest.update(entry["command"].replace(str(ROOT), "").encode())
    for path in sorted({pathlib.Path(entry["file"]), *headers}):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def check_tidy(build: pathlib.Path, seconds: float) -> bool:
    stop = time.monotonic() + seconds
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    deps = headers_by_object(build)
    work = []
    for entry in json.loads((build / "compile_commands.json").read_text()):
        path = pathlib.Path(entry["file"])
        own = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in TIDY_FOLDERS
        if not own or path.name.endswith(("_test.cc", "_bench.cc")):
            continue
        words = shlex.split(entry["command"])
        stamp = cache / tidy_key(entry, deps.get(words[words.index("-o") + 1], []))
        if not stamp.exists():
            work.append((path, stamp))
    work.sort(key=lambda item: -item[0].stat().st_mtime)  # what was edited last comes first

    def run(path: pathlib.Path, stamp: pathlib.Path) -> tuple[pathlib.Path, str | None]:
        if time.monotonic() > stop:
            return path, None
        command = ["clang-tidy", "-p", str(build), "--quiet", "--warnings-as-errors=*", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            stamp.touch()
            return path, ""
        return path, done.stdout + done.stderr

    left, failed = [], 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for job in concurrent.futures.as_completed([pool.submit(run, *item) for item in work]):
            path, output = job.result()
            if output is None:
                left.append(str(path.relative_to(ROOT)))
            elif output:
                failed += 1
                print(output, flush=True)
    print(f"lint: clang-tidy: {len(work) - len(left) - failed} files passed, {failed} failed")
    if left:
        print(f"lint: clang-tidy: not started within {seconds:.0f} s: {' '.join(left)}")
    return failed == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fix", action="store_true", help="format: rewrite the files")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "release")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="tidy: start no file after this time")
    parser.add_argument("checks", nargs="+", choices=["format", "shell", "tidy"])
    args = parser.parse_args()
    tools = {"format": "clang-format", "shell": "shellcheck", "tidy": "clang-tidy"}
    for check in args.checks:
        if shutil.which(tools[check]) is None:
            raise SystemExit(f"lint: {tools[check]} is missing; tools/bootstrap.sh packages installs it")
    passed = {
        "format": lambda: check_format(args.fix),
        "shell": check_shell,
        "tidy": lambda: check_tidy(args.build.resolve(), args.seconds),
    }
    return 0 if all([passed[check]() for check in args.checks]) else 1


if __name__ == "__main__":
    sys.exit(main())
