#!/usr/bin/env bash
# Gets what a build needs and is not there yet. Prints progress on stderr and one result line on stdout.
#
#   tools/bootstrap.sh packages   Debian packages
#   tools/bootstrap.sh build      the same, then libllama; the line is its CMake prefix, empty where the system has it
#                                 DROPKV_LLAMA_CUDA=ON: with its CUDA back end, in a folder of its own (needs nvcc)
#   tools/bootstrap.sh model M    packages, then model M of tools/models.json; the line is the path of its file
#   tools/bootstrap.sh models     the line is the folder of the models; fetches nothing
#
# Everything but the packages lands under $DROPKV_CACHE (default: ${XDG_CACHE_HOME:-~/.cache}/dropkv), keyed by version.
# Nothing is used before it is complete, and a run that finds all there needs no network.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${DROPKV_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/dropkv}

# libllama and ggml come out of the source distribution of this package.
llama_version=0.3.36
llama_sha256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e

packages=(
  # to build
  g++ cmake ninja-build make pkg-config git
  # to fetch
  python3 python3-pip python3-venv ca-certificates
  # to link
  libhwy-dev libcli11-dev nlohmann-json3-dev libfmt-dev
  # to test, measure and check
  libgtest-dev libgmock-dev libbenchmark-dev libopenblas-dev clang-format clang-tidy shellcheck
)

say() { printf 'bootstrap: %s\n' "$*" >&2; }
fail() {
  say "$*"
  exit 1
}

# A second run waits for the first, then finds its work done. The lock ends with the process.
lock() {
  mkdir -p "$cache" || fail "cannot create the cache folder $cache; set DROPKV_CACHE to a folder that can be written"
  exec 9>"$cache/.lock"
  flock --nonblock 9 && return
  say "waiting for another bootstrap of $cache"
  flock 9
}

install_packages() {
  command -v dpkg-query >/dev/null || {
    say "this is no Debian: bring these, or what your system calls them: ${packages[*]}"
    return
  }
  local there missing=() package
  there=$(dpkg-query -W -f='${db:Status-Abbrev}${Package}\n' "${packages[@]}" 2>/dev/null | grep '^ii' || true)
  for package in "${packages[@]}"; do
    grep -qx "ii *$package" <<<"$there" || missing+=("$package")
  done
  [ ${#missing[@]} = 0 ] && return
  local root=()
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || fail "these Debian packages are missing, and there is no sudo to install them:" \
      "as root, run: apt-get install ${missing[*]}"
    root=(sudo)
  fi
  say "installing Debian packages: ${missing[*]}"
  # A stale list often suffices, so an update that fails is only told.
  "${root[@]}" apt-get -o DPkg::Lock::Timeout=300 update -qq >&2 || say "apt-get update failed; trying with the present lists"
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -qq \
    --no-install-recommends "${missing[@]}" >&2 && return
  for package in "${missing[@]}"; do
    apt-cache show "$package" >/dev/null 2>&1 || say "apt knows no package $package"
  done
  fail "apt-get could not install: ${missing[*]}"
}

# With CUDA there is a second folder beside that of the CPU alone.
cuda=${DROPKV_LLAMA_CUDA:-OFF}
case "$cuda" in
  ON) llama_folder=$cache/llama-cuda ;;
  OFF) llama_folder=$cache/llama ;;
  *) fail "DROPKV_LLAMA_CUDA: expected ON or OFF, got '$cuda'" ;;
esac

# libllama is compiled for this machine's processor, so its folder is keyed by that too.
llama_prefix() {
  local processor
  processor=$(grep -m 1 -E '^(flags|Features)' /proc/cpuinfo | cksum | cut -d ' ' -f 1)
  printf '%s/%s-%s\n' "$llama_folder" "$llama_version" "$processor"
}

# Builds into $1. The folder counts once .complete is in it.
build_llama() {
  local prefix=$1 log="$cache/llama-build.log" work sdist="llama_cpp_python-$llama_version"
  work=$(mktemp -d "$cache/build-llama.XXXXXX")
  # shellcheck disable=SC2064  # expanded now: the variable is gone when the trap runs
  trap "rm -rf '$work'" EXIT
  rm -rf "$prefix"
  local takes="2 to 6 minutes" options=()
  if [ "$cuda" = ON ]; then
    command -v nvcc >/dev/null || fail "DROPKV_LLAMA_CUDA=ON: nvcc is not on the PATH"
    takes="about an hour of one core"
    # Without a list CMake takes the GPU that is there; 90-real is that of an H100 or H200 alone.
    options=(-DGGML_CUDA=ON -DGGML_CUDA_NCCL=OFF)
    [ -z "${DROPKV_CUDA_ARCHITECTURES:-}" ] || options+=("-DCMAKE_CUDA_ARCHITECTURES=$DROPKV_CUDA_ARCHITECTURES")
  fi
  say "building libllama from $sdist.tar.gz (once; $takes; log: $log)"
  python3 -m pip download --quiet --no-deps --no-binary :all: -d "$work" "llama-cpp-python==$llama_version" >"$log" 2>&1 ||
    fail "could not download llama-cpp-python==$llama_version: $(tail -n 3 "$log")"
  printf '%s  %s\n' "$llama_sha256" "$work/$sdist.tar.gz" | sha256sum --quiet --check >&2 ||
    fail "$sdist.tar.gz is not the file that was expected (sha256 $llama_sha256)"
  tar -xzf "$work/$sdist.tar.gz" -C "$work"
  {
    # shellcheck disable=SC2016  # $ORIGIN is for the loader
    cmake -S "$work/$sdist/vendor/llama.cpp" -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
      -DCMAKE_INSTALL_PREFIX="$prefix" -DCMAKE_INSTALL_LIBDIR=lib -DCMAKE_INSTALL_RPATH='$ORIGIN' \
      -DBUILD_SHARED_LIBS=ON -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
      -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF \
      -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_CURL=OFF "${options[@]}" &&
      cmake --build "$work/build" -j "$(nproc)" &&
      cmake --install "$work/build"
  } >"$log" 2>&1 || {
    tail -n 30 "$log" >&2
    fail "libllama did not build; the whole log is $log"
  }
  touch "$prefix/.complete"
}

make_llama() {
  local prefix
  prefix=$(llama_prefix)
  if [ ! -e "$prefix/.complete" ]; then
    if [ "$cuda" = OFF ] && pkg-config --exists llama; then
      say "libllama: the system's, $(pkg-config --modversion llama)"
      return
    fi
    build_llama "$prefix"
  fi
  # The place where CMake looks by itself.
  [ "$(readlink "$llama_folder/current")" = "$prefix" ] || ln -sfn "$prefix" "$llama_folder/current"
  printf '%s\n' "$prefix"
}

case "${1:-}" in
  packages)
    lock
    install_packages
    ;;
  build)
    lock
    install_packages
    make_llama
    ;;
  model)
    [ -n "${2:-}" ] || fail "model: expected a name of tools/models.json"
    lock
    install_packages
    python3 "$here/fetch_model.py" "$2" --cache "$cache/models"
    ;;
  models)
    printf '%s\n' "$cache/models"
    ;;
  *)
    fail "unknown step '${1:-}'; expected: packages | build | model NAME | models"
    ;;
esac
