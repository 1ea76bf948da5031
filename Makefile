# `make demo` shows it; `make test` checks it. Both start from nothing but Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test lint types unit fix bench bench-server soak test-slow test-gpu test-clients fuzz clean

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

install: $(STAMP)  ## .venv with .venv/bin/outrider in it

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "outrider needs Python 3.11 or newer; say which one: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: install  ## fetch the demo model and watch speculative decoding at work
	@$(BIN)/outrider pull demo
	@$(BIN)/outrider run --model demo --drafter suffix --chat --compare --max-tokens 160 --file examples/demo_prompt.txt

test: lint types unit  ## lint, types and tests

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/basedpyright

unit: install
	$(BIN)/outrider pull demo
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -rs

fix: install  ## mend what lint can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install  ## the speed table, on this machine
	@$(BIN)/outrider pull demo
	$(BIN)/python benchmarks/cpu.py

bench-server: install  ## the server under load, beside Transformers' own (about 6 minutes)
	@$(BIN)/outrider pull demo
	$(BIN)/python benchmarks/server.py

soak: install  ## random requests for minutes, a third abandoned: nothing may be left over; SOAK='--minutes 60'
	OMP_NUM_THREADS=1 $(BIN)/python tests/server/soak.py $(SOAK)

test-slow: install  ## the tests that take minutes
	$(BIN)/python -m pytest -m slow

test-gpu: install  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

test-clients: install  ## the clients people use, against a running server
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs tests/server/test_client_*.py

CASES ?= 2000
SEED ?= 1
fuzz: install  ## schemathesis on the server: CASES=2000 a route, SEED=1
	OMP_NUM_THREADS=1 FUZZ_CASES=$(CASES) FUZZ_SEED=$(SEED) $(BIN)/python -m pytest -s tests/server/test_fuzz_openapi.py

clean:  ## remove what make made here (the model cache stays)
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis dist build
