#!/usr/bin/env bash
# Configures where needed and builds the presets that are named. Quiet unless something is built or fails.
#
#   tools/build.sh release asan
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for preset in "$@"; do
  # Ninja reconfigures by itself when a CMake file changed; the presets it does not watch.
  if [ ! -e "build/$preset/build.ninja" ] || [ CMakePresets.json -nt "build/$preset/build.ninja" ]; then
    cmake --preset "$preset"
  fi
  cmake --build "build/$preset"
done
