# Everything runs in .venv; nothing outside of this folder is touched.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# tests wait more than they compute
TEST_PROCESSES ?= 2

.PHONY: help setup demo test check protocol format bench up down clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP)  ## the virtual environment

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("vcasgd needs Python 3.11 or newer, this is %d.%d; set PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,check,examples]'
	@touch $@

demo: setup  ## train on this machine while workers die, in two minutes
	$(BIN)/vcasgd demo

test: setup  ## all tests: real servers, real clusters, real kills
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile

check: setup  ## style, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@if [ -n "$$(find terraform -name '*.tf' 2>/dev/null)" ]; then terraform fmt -check -recursive terraform; fi

protocol:  ## the model of the protocol, with spin: a minute
	$(PYTHON) docs/protocol/check.py

format: setup  ## mend what can be mended without thinking
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup  ## the store against its peers, in about ten minutes; let nothing else run
	$(BIN)/python benchmarks/run.py

up: setup  ## start the stack on this machine
	$(BIN)/vcasgd up

down: setup  ## stop it; jobs go on at the next up
	$(BIN)/vcasgd down

clean:  ## remove the environment and caches
	rm -rf $(VENV) benchmarks/.venvs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
