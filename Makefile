# make demo: the paper's toy figures and a report of every table and figure.  make test: run the tests.  Both set up .venv themselves.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
NAMES ?= logistic plateau sensitivity
RECORD ?= study

.PHONY: demo study test lint api clean

demo: $(VENV)/.demo
	$(BIN)/python -m experiments run toy --seeds=1 --variants=false --record=demo
	$(BIN)/python -m experiments figure toy --record=demo
	$(BIN)/python -m experiments report

study: $(VENV)/.peers
	for name in $(NAMES); do $(BIN)/python -m experiments run $$name --record=$(RECORD) || exit 1; done
	$(BIN)/python -m experiments report --record=$(RECORD)

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

api: $(VENV)/.demo
	$(BIN)/python docs/make_api.py

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "particlax needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.%: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

clean:
	rm -rf $(VENV) out build
