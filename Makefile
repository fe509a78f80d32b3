# Every target sets itself up on first use: a virtual environment in .venv with pinned packages, and the embedded model.
#
#   make test PYTHON=python3.12        another interpreter for the environment
#   make reports ARGS="--help"         options for the command behind a target
#
# pip obeys its own settings (PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf …). On Linux its default torch is a CUDA build of
# several GB; where a CPU build is wanted, point pip to one before the first `make`.

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
UNFINISHED := $(VENV)/.unfinished
# After set-up nothing needs the network, and nothing may ask for it behind the user's back.
OFFLINE := HF_HUB_OFFLINE=1
PRESETS := fintech_fraud $(filter-out fintech_fraud,$(sort $(basename $(notdir $(wildcard presets/*.json)))))

.PHONY: help setup reports test lab bench extras test-extras lint clean

help:
	@echo "make reports   run the notebooks into reports/"
	@echo "make test      run the tests"
	@echo "make lab       open the notebooks in JupyterLab"
	@echo "make bench     measure the engines on this machine, for README.md and notebook 07"
	@echo "make extras    add the backends that are not part of the set-up: MLX, and llama.cpp, built from source"
	@echo "make test-extras   run their tests"
	@echo "make lint      ruff and mypy"
	@echo "make clean     remove .venv and all caches in this folder"

# An environment whose installation was interrupted is thrown away, not mended.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "pcdlab needs Python 3.11 or newer, and '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)." >&2; \
	    echo "Name another one: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@if test -e $(UNFINISHED); then rm -rf $(VENV); fi
	$(PYTHON) -m venv $(VENV)
	@touch $(UNFINISHED)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@mv $(UNFINISHED) $(READY)

# Quick when the model is there; apart from .ready, because the cache that holds it can be emptied at any time.
setup: $(READY)
	@$(BIN)/pcdlab models fetch smollm2-135m >/dev/null

reports: setup
	$(OFFLINE) $(BIN)/pcdlab report $(ARGS)

test: setup
	$(OFFLINE) $(BIN)/python -m pytest $(ARGS)

lab: setup
	$(BIN)/jupyter-lab $(ARGS) notebooks/

bench: setup
	$(OFFLINE) $(BIN)/pcdlab bench $(PRESETS) --sweeps --json reports/bench.json $(ARGS)
	$(BIN)/python -m pcdlab.bench_report README.md

# Builds llama.cpp, which takes minutes; pip keeps what it built in its own cache for the next time.
extras: setup
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,llamacpp,mlx]'

test-extras: extras
	$(OFFLINE) $(BIN)/python -m pytest tests/test_llamacpp_*.py tests/test_mlx_*.py $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
