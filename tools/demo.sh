#!/usr/bin/env bash
# The demonstration behind `make demo`: a long document with one planted fact, answered from the full cache and from 10%
# and 5% of it. tools/demo.sh smollm2|qwen; DROPKV_MODEL names the GGUF file.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=${1:-smollm2}
# The document's length suits what the model can answer from its full cache; seed and depth are fixed, not chosen.
case "$model" in
  smollm2) words=3200 ;;
  qwen) words=6900 ;;
  *)
    echo "demo: MODEL: expected smollm2 or qwen, got '$model'" >&2
    exit 2
    ;;
esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 "$here/make_document.py" --seed 100 --depth 0.5 --words "$words" --out "$work/document.txt" --meta "$work/meta.json"
meta() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$work/meta.json" "$1"; }
echo "A chronicle of $words words; somewhere in its middle stands: \"$(meta fact)\""
"$here/../build/release/dropkv" run -m "${DROPKV_MODEL:?demo: DROPKV_MODEL must name the GGUF file}" \
  -f "$work/document.txt" -p "$(meta question)" --prefix "$(meta answer_prefix)" --expect "$(meta answer)" \
  --budget 10%,5% --compare full --max-tokens 32
