# SPDX-License-Identifier: MIT
# Everything runs in a virtual environment that make has made, at the first call, and that it updates. One that somebody
# else has made stays as it is.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OURS := $(VENV)/.made-by-make

# Where there is a GPU, torch is whatever build the machine needs; elsewhere it is the one that was tested.
CONSTRAINTS := $(shell nvidia-smi -L >/dev/null 2>&1 || echo "--constraint constraints.txt")
PORT ?= 8000
GPUS := $(shell nvidia-smi -L 2>/dev/null | wc -l)

# Tests start many processes, which load torch and TileLang: twice as fast with the bytecode that the first one keeps.
unexport PYTHONDONTWRITEBYTECODE

# What stops, with a message, where there is an environment without a mark of ours. Older ones have the second mark.
refuse_others = if [ -e $(VENV) -a ! -e $(OURS) -a ! -e $(READY) ]; then echo "$(1)" >&2; exit 1; fi

.PHONY: help demo test test-nightly test-cluster test-integrations test-newest lint docs docs-serve clean

help:
	@echo "make demo    all-gather and GEMM, in order and overlapped: on all GPUs, and emulated as one picture"
	@echo "make test    check the source and run all tests but those of make test-nightly"
	@echo "make test-nightly   tests of stock kernels, long compilations, a sample of emulated programs lowered to CUDA, more random programs"
	@echo "make test-cluster   jobs on hosts that are network namespaces, and under a real Slurm (root; minutes)"
	@echo "make test-integrations   behind the names of transformers, vLLM and SGLang, with their own packages (downloads 1 GB)"
	@echo "make test-newest   the newest TileLang, PyTorch, NCCL, NVSHMEM and CUDA bindings, each by itself (downloads gigabytes)"
	@echo "make lint    check the source only"
	@echo "make docs    build the documentation site into site/; make docs-serve shows it at port $(PORT)"
	@echo "make clean   remove the virtual environment and all caches"
	@echo "PYTHON=...   which Python (3.10 to 3.13) makes the environment; now $(PYTHON)"

# The picture is of emulated devices; where there are several GPUs, the program runs on them first. An environment of
# somebody else's will do, if TileScale is installed there.
demo:
	@[ -x $(BIN)/tilescale ] && [ ! -e $(OURS) ] || $(MAKE) --no-print-directory $(READY)
	@if [ $(GPUS) -gt 1 ]; then $(BIN)/tilescale run -n $(GPUS) examples/distributed/22_ag_gemm_overlapped.py; fi
	@mkdir -p build && $(BIN)/python examples/demo.py --to build/demo.svg

PYTEST := $(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist worksteal

# Beside the checks of the source one process loads all tests, from which the workers are forked.
test: $(READY)
	@$(MAKE) --no-print-directory lint & lint=$$!; $(PYTEST) -m "not nightly"; tests=$$?; wait $$lint && exit $$tests

test-nightly: $(READY)
	@$(PYTEST) -m nightly
	@$(PYTEST) --lower=sample tests/emulator tests/language
	@RANDOM_PROGRAMS=800 $(PYTEST) -o faulthandler_timeout=0 tests/emulator/test_against_numpy.py tests/overlap/test_chains.py

# What is missing is skipped with its reason; on Debian: apt-get install iproute2 slurm-wlm munge libpmix-dev libopenmpi3 openmpi-bin
test-cluster: $(READY)
	@$(BIN)/python -m pytest -q -n 0 tests/cluster/hosts.py tests/cluster/slurm.py

# Packages of engines, without what they depend on: much of it is for GPUs, and they pin other versions of torch and
# TileLang. What cannot be had or imported here is skipped with its reason.
INTEGRATIONS := build/integrations
test-integrations: $(INTEGRATIONS)/.ready
	@PYTHONPATH=$(CURDIR):$(CURDIR)/$(INTEGRATIONS) $(BIN)/python -m pytest -q -n 0 tests/integrations/*.py

PACKAGES := tests/integrations/packages.txt
$(INTEGRATIONS)/.ready: $(PACKAGES) | $(READY)
	@rm -rf $(INTEGRATIONS) && mkdir -p $(INTEGRATIONS)
	@install="$(BIN)/python -m pip install --quiet --quiet --no-deps --no-compile --target $(INTEGRATIONS)"; \
		$$install --requirement $(PACKAGES) || for package in $$(grep -v '^#' $(PACKAGES)); do \
		$$install $$package || echo "no $$package" >&2; done
	@touch $@

# The newest of what we build on, in a folder of its own; downloads gigabytes.
test-newest: $(READY)
	@$(BIN)/python benchmarks/newest.py build/newest

lint: $(READY)
	@$(BIN)/python -m ruff check --quiet .
	@$(BIN)/python -m mypy --no-error-summary

docs: $(READY)
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --doctree-dir build/doctrees docs site
	@echo "built: site/index.html"

docs-serve: docs
	@$(BIN)/python -m http.server --directory site --bind 127.0.0.1 $(PORT)

# The second form serves systems whose Python comes without ensurepip.
$(READY): pyproject.toml constraints.txt
	@$(call refuse_others,$(VENV) was not made by make and stays as it is: remove it or make another one with VENV=build/venv)
	@echo "Installing into $(VENV); the first time this takes a few minutes."
	@mkdir -p $(VENV) && touch $(OURS)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) >/dev/null || { \
		$(PYTHON) -m venv --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(BIN)/python install --quiet --quiet pip; }
	@$(BIN)/python -m pip install --quiet --quiet --no-compile $(CONSTRAINTS) --editable ".[test]"
	@touch $@

clean:
	@$(call refuse_others,$(VENV) was not made by make: remove it yourself)
	@rm -rf $(VENV) build dist site docs/examples .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
