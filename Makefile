# Two commands on a fresh machine: `make serve` and `make test`.
PYTHON ?= python3
PORT ?= 8000
MODEL ?= smollm2-135m
VENV := .venv
BIN := $(VENV)/bin
NATIVE := native/CMakeLists.txt $(wildcard native/src/*)

.PHONY: serve test check docs bench clean

serve: $(VENV)/.serve
	@exec $(BIN)/headway serve $(MODEL) --port $(PORT)

test: $(VENV)/.dev
	@scripts/check

# Regenerates the docs that are made from code (CLI help, settings, metrics).
docs: $(VENV)/.dev
	@$(BIN)/python scripts/docs.py

bench: $(VENV)/.dev
	@$(BIN)/python -m benchmarks.engine

# Serving needs a build of the package and its few dependencies; no PyTorch.
$(VENV)/.serve: pyproject.toml constraints.txt $(NATIVE) | $(BIN)/pip
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(NATIVE) | $(BIN)/pip
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.serve

# pip comes last into a new environment: one that was interrupted half-way is made again.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v < (3, 11) and sys.exit("headway needs Python 3.11 or newer; \
	$(PYTHON) is %d.%d; choose another: make PYTHON=python3.12 ..." % v[:2])'
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
