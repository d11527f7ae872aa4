# make demo: draw the paper's toy figures.  make test: run the tests.  Both set up .venv themselves.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo study reference few test lint api clean

demo: $(VENV)/.demo
	$(BIN)/python -m experiments.toy

study: $(VENV)/.demo
	$(BIN)/python -m experiments.toy --seeds=5 --record

reference: $(VENV)/.peers
	$(BIN)/python -m experiments.reference --peers --record=study

few: $(VENV)/.demo
	$(BIN)/python -m experiments.few --record=study
	$(BIN)/python -m experiments.few --kernels --particles=100 --record=study
	$(BIN)/python -m experiments.few --figure

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
