# Everything a fresh clone needs: make demo, make test, make check.
# Only relative paths, so the clone may lie in a folder with spaces.

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# torch first and by exact version: the extras then find it installed and never pull another build.
TORCH := torch==2.13.0
IS_PYTHON_311 := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	if $$p $(IS_PYTHON_311) 2>/dev/null; then echo $$p; break; fi; done)

.PHONY: help install demo test check format clean

help:
	@echo "make demo     train GPT-2 on 4 local workers, kill two, and check every loss (about 3 minutes)"
	@echo "make test     unit tests, then scenarios that start and kill real processes"
	@echo "make check    format, lint, strict types, tests: what CI runs"
	@echo "make install  create .venv with everything; nothing to do when it is current"
	@echo "make format   rewrite the sources in the project's format"
	@echo "make clean    remove .venv, caches and build folders"
	@echo "Another interpreter: make demo PYTHON=/path/to/python3.11"

install: $(STAMP)

$(STAMP): pyproject.toml
	@"$(PYTHON)" $(IS_PYTHON_311) 2>/dev/null || { \
		echo "Varuna needs Python 3.11 or newer; found: $$("$(PYTHON)" --version 2>/dev/null || echo no Python)." >&2; \
		echo "Name one: make install PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $(STAMP)

demo: install
	@$(BIN)/varuna demo

test: install
	$(BIN)/python -m pytest -q tests/unit
	$(BIN)/python -m pytest -q tests/scenarios

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	@$(MAKE) --no-print-directory test

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist demo-output bench-output .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
