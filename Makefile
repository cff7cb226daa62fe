# The first Python that runs and is new enough; a name on the PATH alone proves neither.
PYTHON ?= $(shell for p in python3.12 python3.13 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check setup links clean

demo: $(VENV)/demo
	@$(BIN)/dflash-mlx generate --pair tiny --seed 2 --max-tokens 200 --stats \
		"Write a Python function that checks if a number is even." </dev/null

test: $(VENV)/dev
	$(BIN)/python -m pytest -q

check: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -q tests/test_layers.py
	rm -rf build/types && $(BIN)/pip install -q --no-deps --target build/types . && $(BIN)/mypy build/types/dflash_mlx
	sh tests/wheel.sh $(BIN)/python

setup: $(VENV)/dev

$(VENV)/demo: pyproject.toml
	@test -n "$(PYTHON)" || { echo "dflash-mlx needs Python 3.11 or newer; name it with make PYTHON=/path/to/python3"; exit 1; }
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -e .
	@touch $@

$(VENV)/dev: $(VENV)/demo
	$(BIN)/pip install -q -e '.[dev]'
	@touch $@

links:
	for room in cli metal models; do ln -sfn ../$$room dflash_mlx/$$room; done

clean:
	rm -rf $(VENV) build dist *.egg-info
