#!/usr/bin/env bash
# On a GPU machine: tests of the kernels, then the benchmark beside PyTorch and Triton; table on the screen, CSV and plot
# in the folder named. Needs nothing from a network: copy build/release/cuda and bench/gpu.
#
#   bench/gpu/run.sh [LIBRARY_FOLDER [RESULTS_FOLDER]]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
library="${1:-$here/../../build/release/cuda}"
results="${2:-.}"

# The float64 reference takes most of the time: one shard of the tests a core.
shards="$(nproc)"
pids=()
for shard in $(seq 0 $((shards - 1))); do
  GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard "$library/dropkv_cuda_test" --gtest_brief=1 \
    >"$results/test.$shard.log" 2>&1 &
  pids+=($!)
done
failed=0
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
grep -hE 'FAILED|PASSED' "$results"/test.*.log | sort | uniq -c
[ "$failed" = 0 ] || exit 1

python3 "$here/bench.py" --lib "$library/libdropkv_cuda.so" --csv "$results/gpu.csv"
python3 "$here/plot.py" "$results/gpu.csv" "$results/gpu.svg"
"$library/dropkv_cuda_decode_bench"
