# make run: the main job and its report.  make test: all checks and tests.  Both make their own .venv first.
# make evalscope: an environment for EvalScope alone, whose pins are not Hydra's; benchmarks that need it find it there.
# JOBS: processes of the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EVALSCOPE := .venv-evalscope
STORE ?= store
JOBS ?= 2
ARGS ?=

.PHONY: run test check evalscope clean

run: $(VENV)/.installed
	$(BIN)/python -m moe_lab +experiment=task_agnostic store=$(STORE) $(ARGS)

test: check
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/lint-imports
	$(BIN)/mypy

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt $(VENV)/.installed
	$(BIN)/python -m pip install -q -c constraints.txt --group dev
	touch $@

evalscope: $(EVALSCOPE)/.installed

$(EVALSCOPE)/.installed: constraints-evalscope.txt
	$(PYTHON) -m venv $(EVALSCOPE)
	$(EVALSCOPE)/bin/python -m pip install -q -c constraints-evalscope.txt evalscope
	touch $@

clean:
	rm -rf $(VENV) $(EVALSCOPE) build dist .mypy_cache .ruff_cache .pytest_cache
