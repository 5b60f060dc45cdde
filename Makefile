# A thin front of tools/bootstrap.sh, cmake --preset and ctest; each of these also works alone.
#
#   make build         what is missing, then the release build: build/release/dropkv
#   make demo          the above and a model, then the demonstration; MODEL=smollm2 (default) or qwen
#   make test          every test, under the sanitizers too, and lint; ends with ctest's summary
#   make test-models   the tests with models, on the large one (1.1 GB) too; ACCEPT_GEMMA=1 accepts its terms and adds Gemma
#   make test-peers    `dropkv score` beside kvpress on fresh random models; installs torch and kvpress (6 GB)
#   make test-asan, test-tsan, bench, lint, format, install (PREFIX=/usr/local), clean
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
MODEL ?= smollm2
PREFIX ?= /usr/local
CTEST := ctest --output-on-failure -j $(shell nproc)
export PYTHONDONTWRITEBYTECODE := 1
export DROPKV_MODELS ?= $(shell tools/bootstrap.sh models)

.PHONY: build demo test test-models test-peers test-asan test-tsan bench lint format install clean

build:
	@tools/bootstrap.sh build >/dev/null
	@tools/build.sh release

demo: build
	@model=$$(tools/bootstrap.sh model $(MODEL)); DROPKV_MODEL=$$model tools/demo.sh $(MODEL)

# One ctest over three builds: its last lines count everything.
test:
	@tools/bootstrap.sh build >/dev/null
	@tools/bootstrap.sh model smollm2 >/dev/null
	@tools/build.sh release asan tsan
	@printf 'subdirs(release asan tsan)\n' >build/CTestTestfile.cmake
	@cd build && DROPKV_TEST_MODEL=smollm2 $(CTEST) -LE '^(models|gpu)$$'

test-models:
	@tools/bootstrap.sh build >/dev/null
	@tools/bootstrap.sh model smollm2 >/dev/null
	@tools/bootstrap.sh model qwen >/dev/null
	@if [ "$${ACCEPT_GEMMA:-}" = 1 ]; then tools/bootstrap.sh model gemma >/dev/null; fi
	@tools/build.sh release
	@cd build/release && $(CTEST) -L '^(llama|models)$$'

test-peers: build
	@tests/peers/kvpress_live.sh

test-asan test-tsan: test-%:
	@tools/bootstrap.sh build >/dev/null
	@tools/bootstrap.sh model smollm2 >/dev/null
	@tools/build.sh $*
	@cd build/$* && DROPKV_TEST_MODEL=smollm2 $(CTEST) -LE '^(models|gpu)$$'

bench: build
	@for program in build/release/bench/*; do echo "$$program"; "$$program"; done

lint: build
	@tools/lint.py format shell tidy

format:
	@tools/bootstrap.sh packages
	@tools/lint.py --fix format

install: build
	@cmake --install build/release --prefix $(PREFIX)

clean:
	@rm -rf build
