# Everything runs in .venv; the stamps keep an installation until pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: bench test check clean

bench: $(VENV)/.bench-installed
	$(BIN)/python -m bench run --trace video,math --planes dataplane,controller --hosts 2 --prompts 8 --seed 0 --json bench/out/report.json

test: $(VENV)/.test-installed
	$(BIN)/coverage run -m pytest
	$(BIN)/coverage combine --quiet && $(BIN)/coverage report

check: $(VENV)/.test-installed
	$(BIN)/ruff format --check . && $(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) bench/out .coverage .coverage.*

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("dataplane needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.%-installed: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	touch $@
