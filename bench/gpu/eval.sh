#!/usr/bin/env bash
# `dropkv eval` on a GPU machine that files are only copied to, and only few at a time.
#
# Here: the program with the libraries it needs, and a model cut into pieces of 45 MB.
#   bench/gpu/eval.sh pack FOLDER [MODEL.gguf]
# There, in this order; WORK is any folder. Pieces may come one by one, results of an earlier run too:
#   bench/gpu/eval.sh place WORK FILE...
#   bench/gpu/eval.sh run WORK SECONDS FOLDER MODEL.gguf FLAGS...
#   bench/gpu/eval.sh tasks WORK SECONDS FOLDER MODEL.gguf TASK,TASK,... FLAGS...
# `run` evaluates for at most SECONDS and leaves FOLDER/results.tar.gz and FOLDER/eval.log. `tasks` starts a process for
# each task, all at once, each with a folder of results and a log; they take the GPUs in turn and share them through
# CUDA's MPS where it is installed, without which they wait for one another's turns. Placed again, the results let the
# same command go on where it stopped.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cache=${DROPKV_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/dropkv}

fail() {
  printf 'eval.sh: %s\n' "$*" >&2
  exit 1
}

pack() {
  local folder=$1 model=${2:-} program=${DROPKV_PROGRAM:-$root/build/release/dropkv}
  local cuda=${DROPKV_LLAMA_CUDA_LIB:-$cache/llama-cuda/current/lib} stage
  [ -x "$program" ] || fail "no program $program: make build, or DROPKV_PROGRAM"
  [ -e "$cuda/libggml-cuda.so" ] || fail "no libllama with CUDA in $cuda: see docs/run.md, or DROPKV_LLAMA_CUDA_LIB"
  mkdir -p "$folder"
  stage=$(mktemp -d)
  # shellcheck disable=SC2064  # expanded now: the variable is gone when the trap runs
  trap "rm -rf '$stage'" EXIT
  mkdir "$stage/lib"
  strip -o "$stage/dropkv" "$program"
  cp -P "$cuda"/lib{llama,ggml}*.so* "$stage/lib"
  # Of the rest what a machine of another distribution may have in another version, or not at all.
  ldd "$program" | awk '/lib(hwy|fmt)\.so/ {print $3}' | xargs -r -I{} cp -L {} "$stage/lib"
  tar -C "$stage" -c . | xz -T0 >"$folder/program.tar.xz"
  [ -z "$model" ] || split -b 45M -d -a 3 "$model" "$folder/$(basename "$model").part"
  ls -sh "$folder"
}

place() {
  local work=$1 file name number
  shift
  mkdir -p "$work/results"
  for file in "$@"; do
    name=$(basename "$file")
    case "$name" in
      program.tar.xz) tar -xJf "$file" -C "$work" ;;
      results.tar.gz) tar -xzf "$file" -C "$work/results" ;;
      *.part[0-9][0-9][0-9])
        number=${name##*.part}
        name=${name%.part*}
        [ "$number" = 000 ] && rm -f "$work/$name" "$work/$name".next
        [ "$((10#$number))" = "$(cat "$work/$name.next" 2>/dev/null || echo 0)" ] ||
          fail "$file: expected piece $(cat "$work/$name.next" 2>/dev/null || echo 0) of $name"
        cat "$file" >>"$work/$name"
        echo $((10#$number + 1)) >"$work/$name.next"
        ;;
      *) cp "$file" "$work" ;;
    esac
  done
}

# evaluate WORK SECONDS LOG RESULTS MODEL.gguf FLAGS...
evaluate() {
  local work=$1 seconds=$2 log=$3 results=$4 model=$5
  shift 5
  # OpenMP's threads would spin between a GPU's pieces of work.
  LD_LIBRARY_PATH=$work/lib OMP_WAIT_POLICY=passive "$work/dropkv" eval --model "$work/$model" --out "$results" \
    --time "$seconds" "$@" >"$log" 2>&1
}

run() {
  local work=$1 seconds=$2 folder=$3 model=$4 status=0
  shift 4
  mkdir -p "$folder" "$work/results"
  evaluate "$work" "$seconds" "$folder/eval.log" "$work/results" "$model" "$@" || status=$?
  tail -n 40 "$folder/eval.log"
  tar -C "$work/results" -czf "$folder/results.tar.gz" .
  return "$status"
}

# One server for all processes of this script; it ends with it.
share_gpu() {
  command -v nvidia-cuda-mps-control >/dev/null || return 0
  CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
  if nvidia-cuda-mps-control -d; then
    trap 'echo quit | nvidia-cuda-mps-control >/dev/null; rm -rf "$CUDA_MPS_PIPE_DIRECTORY"' EXIT
  else
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  fi
}

tasks() {
  local work=$1 seconds=$2 folder=$3 model=$4 names=$5 status=0 gpus name
  local -A started=()
  shift 5
  mkdir -p "$folder" "$work/results"
  gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
  share_gpu
  for name in ${names//,/ }; do
    [ "$gpus" -lt 2 ] || export CUDA_VISIBLE_DEVICES=$((${#started[@]} % gpus))
    evaluate "$work" "$seconds" "$folder/$name.log" "$work/results/$name" "$model" --tasks "$name" "$@" &
    started[$name]=$!
  done
  for name in "${!started[@]}"; do
    wait "${started[$name]}" || {
      status=1
      printf '%s: %s\n' "$name" "$(tail -n 1 "$folder/$name.log")"
    }
  done
  tar -C "$work/results" -czf "$folder/results.tar.gz" .
  wc -l "$work"/results/*/results.jsonl
  return "$status"
}

case "${1:-}" in
  pack) [ $# -ge 2 ] || fail "expected: pack FOLDER [MODEL.gguf]" ;;
  place) [ $# -ge 3 ] || fail "expected: place WORK FILE..." ;;
  tasks) [ $# -ge 6 ] || fail "expected: tasks WORK SECONDS FOLDER MODEL.gguf TASK,TASK,... FLAGS..." ;;
  run) [ $# -ge 5 ] || fail "expected: run WORK SECONDS FOLDER MODEL.gguf FLAGS..." ;;
  *) fail "unknown step '${1:-}'; expected: pack | place | run | tasks" ;;
esac
"$@"
