# Two verbs for users, from a fresh clone with Python 3.11 or later, make and git: `make demo` and `make test`.
# `make PYTHON=python3.12 test` takes another interpreter; `make demo ARGS="--context 2048"` passes options on.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The first interpreter that is new enough.
ifndef PYTHON
PYTHON := $(shell for python in python3.11 python3 python3.12 python3.13; do \
    $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
endif

VENV := .venv
BIN := $(VENV)/bin
# Named by version, so that another PYTHON sets up anew.
STAMP := $(VENV)/installed-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
ARGS ?=
# Two workers, as many as CI has cores; each file in one, since fixtures that take long are a file's own. Torch's threads
# do not spin while they wait, or the workers would take the cores from each other.
PYTEST := OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest --numprocesses 2 $(PYTEST_ARGS)

.PHONY: help demo test lint types interpreter tests format clean

help: ## what there is
	@grep -E '^[a-z]+:.*## ' Makefile | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 20

demo: $(STAMP) ## a DSA model generates with stock transformers and with keysift: same tokens, times, a figure
	@echo "== demo: keysift demo $(ARGS)"
	@$(BIN)/keysift demo $(ARGS)

test: lint types interpreter tests ## everything: lint, types, all tests (under 15 minutes on two cores)

# One after another also under `make -j`: pytest's summary stays the last thing printed, and two cores are not shared.
.NOTPARALLEL:

lint: $(STAMP) ## ruff: rules and format
	@echo "== lint: ruff check, ruff format --check"
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: $(STAMP) ## mypy --strict on src
	@echo "== types: mypy"
	@$(BIN)/mypy

# A process of its own: Triton decides at import whether to interpret or to compile.
interpreter: $(STAMP) ## the Triton kernels on a CPU
	@if [ -d tests/interpreter ]; then \
	    echo "== tests: Triton kernels under the interpreter"; \
	    TRITON_INTERPRET=1 $(PYTEST) tests/interpreter; \
	fi

tests: $(STAMP) ## pytest: tests and doctests
	@echo "== tests: pytest"
	@$(PYTEST) --dist loadfile

format: $(STAMP) ## let ruff format and fix
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

clean: ## remove the virtual environment and every cache
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

$(STAMP): pyproject.toml constraints.txt
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "keysift needs Python 3.11 or later; found '$(PYTHON)'. Name one: make PYTHON=python3.12 ..."; exit 1; }
	@echo "== setup: $(VENV) with $$($(PYTHON) --version), versions from constraints.txt (once; about two gigabytes on disk)"
	@test -e $@ || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]' 2>&1 \
	    | tee $(VENV)/install.log \
	    | sed -u -n -E 's/^Collecting ([^ ]+).*/   \1/p; s/^Processing .*\/([^/]+[.]whl)$$/   \1/p; /^(Installing collected|ERROR|error)/p' \
	    || { tail -n 40 $(VENV)/install.log; exit 1; }
	@touch $@
