#!/usr/bin/env bash
# `dropkv score` beside kvpress (tests/peers/kvpress_live.py) in a virtual environment of its own, made once under the
# cache folder. Arguments are handed on: --seed S, --cases N.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
version=0.5.5
venv=${DROPKV_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/dropkv}/kvpress-$version
if [ ! -e "$venv/complete" ]; then
  echo "installing kvpress $version, torch and transformers into the cache folder (about 6 GB)" >&2
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet "kvpress==$version" "transformers<5.3" torch safetensors
  touch "$venv/complete"
fi
exec "$venv/bin/python" "$here/kvpress_live.py" "$here/../../build/release/dropkv" "$@"
