# Everything a fresh machine needs: Python 3.11, gcc and make. `make demo` and `make test` do their own set-up.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
VENV ?= .venv
# Two architectures keep a developer's build short; `pip install .` builds all of them.
CUDA_ARCHS ?= 90;120
PY := $(VENV)/bin/python
BIN := $(abspath $(VENV))/bin
CPP := $(shell find csrc CMakeLists.txt -type f 2>/dev/null)
DEPS := $(VENV)/.deps-$(firstword $(shell cksum requirements/lock.txt))
PYTEST := $(PY) -m pytest

export PATH := $(BIN):$(PATH)
export HF_HUB_OFFLINE := 1

.PHONY: all setup build demo test test-unit test-protocol test-server test-gpu lint format soak upstream wheel lock clean

all: build

$(DEPS): requirements/lock.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements/lock.txt
	rm -f $(VENV)/.deps-* && touch $@

# The stamps live in the checkout: an environment shared by two checkouts must be pointed at this one.
build/.installed: $(DEPS) pyproject.toml
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -C wheel.cmake=false -e .
	mkdir -p build && touch $@

build/.built: build/.installed $(CPP)
	$(BIN)/cmake -S . -B build/cmake -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython3_EXECUTABLE=$(abspath $(PY)) \
		-DSM120_CUDA_ARCHS="$(CUDA_ARCHS)"
	$(BIN)/cmake --build build/cmake
	touch $@

setup: $(DEPS)

build: build/.built

demo: build
	$(BIN)/sglang-sm120 demo

test: test-unit test-protocol test-server test-gpu

test-unit: build
	$(PYTEST) tests/unit -m "not soak"

test-protocol: build
	$(PYTEST) tests/protocol -m "not soak"

test-server: build
	$(PYTEST) tests/server -m "not soak"

test-gpu: build
	$(PYTEST) tests/gpu -m "not soak"

# The patches for SGLang: each alone and the series in order apply, are formatted and pass their tests; then the plugin
# runs on the patched trees, with real servers on the CPU. Needs no network: the trees are copies of the installed SGLang.
upstream: build
	$(PY) tools/upstream.py

soak: build
	$(PYTEST) tests -m soak

lint: $(DEPS)
	$(BIN)/pre-commit run --all-files --show-diff-on-failure

format: $(DEPS)
	$(BIN)/ruff format . && $(BIN)/ruff check --fix . && find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format -i

wheel: $(DEPS)
	$(PY) -m pip wheel --quiet --no-deps --no-build-isolation -w dist .

# Run in a throw-away environment: installs the newest allowed versions and writes them down.
lock:
	rm -rf build/lock-venv && $(PYTHON) -m venv build/lock-venv
	build/lock-venv/bin/pip install --quiet sglang==0.5.23 -r requirements/dev.txt
	{ head -1 requirements/lock.txt; build/lock-venv/bin/pip freeze; } > requirements/lock.txt.new
	mv requirements/lock.txt.new requirements/lock.txt

clean:
	rm -rf build dist python/sglang_sm120/_lib .pytest_cache .mypy_cache .ruff_cache .hypothesis
