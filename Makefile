# Everything a person does with a clone; each target sets up what it needs and nothing twice.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
PROMPT ?= Write a Python function that checks whether a string is a palindrome, and explain it.

.PHONY: help demo test test-slow check format docs bench engine clean require-python

help:            ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: require-python      ## answer one prompt plainly and speculatively, side by side
	@$(PYTHON) tools/setup_env.py demo --venv $(VENV)
	@echo
	@echo "1. plain, then with the DSpine drafter at 3 drafts a step, whether that pays here or not"
	@$(BIN)/dspine run --compare --proposer dspine --spec-draft-n-max 3 -n 128 "$(PROMPT)"
	@echo
	@echo "2. plain, then as dspine decides by itself after measuring this machine (a few seconds)"
	@$(BIN)/dspine run --compare -n 128 "$(PROMPT)"

# Tests of one file share what is slow to make, so they stay together. The threads of one worker
# sleep while they wait for each other, and leave the cores to the other.
test: require-python      ## all tests (ARGS="-k name" passes options to pytest; WORKERS=0: one process)
	@$(PYTHON) tools/setup_env.py test --venv $(VENV)
	@OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile $(ARGS)

test-slow: require-python ## the tests that take minutes
	@$(PYTHON) tools/setup_env.py test --venv $(VENV)
	@$(BIN)/python -m pytest -m slow $(ARGS)

check: require-python     ## format, lint, types, docs
	@$(PYTHON) tools/setup_env.py test --venv $(VENV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m tools.check_docs

format: require-python    ## rewrite the sources in the project's format
	@$(PYTHON) tools/setup_env.py test --venv $(VENV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: require-python      ## write the generated tables of docs and README.md anew
	@$(PYTHON) tools/setup_env.py test --venv $(VENV)
	$(BIN)/python -m tools.flag_table --write
	$(BIN)/python -m tools.readme_table --write
	$(BIN)/python -m tools.result_tables --write

bench: require-python     ## measure the default pair, and write what is measured into the docs
	@$(PYTHON) tools/setup_env.py demo --venv $(VENV)
	@$(BIN)/python benchmarks/demo_pair.py $(ARGS)
	@$(BIN)/python -m tools.readme_table --write
	@$(BIN)/python -m tools.result_tables --write

engine: require-python    ## compile llama.cpp again, natively; CMAKE_ARGS adds options
	@$(PYTHON) tools/setup_env.py engine --venv $(VENV)

clean:           ## remove the virtual environment and all caches
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

require-python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "dspine needs Python 3.11 or newer, and there is no '$(PYTHON)': install it, or name one, as in: make PYTHON=python3.12 demo"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "dspine needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) -V 2>&1): name a newer one, as in: make PYTHON=python3.12 demo"; exit 1; }
