# Two commands do everything on a fresh clone: make demo, make test. Each makes .venv first if it is not there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check format gpu bench clean

demo: $(VENV)/ready
	$(BIN)/ebbtide demo

test: $(VENV)/ready
	$(BIN)/python -m pytest

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python -m benchmarks.tables --check

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python -m benchmarks.tables

# On a machine with an accelerator, in an environment that has torch, transformers and pytest.
gpu:
	PYTHONPATH=src:. $(PYTHON) -m pytest -m gpu tests/gpu
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.run

# The figures that need no accelerator.
bench: $(VENV)/ready
	PYTHONPATH=src:tests:. $(BIN)/python -m benchmarks.without_gpu
	$(BIN)/python -m benchmarks.tables

# torch first and alone: asked for by another package it could arrive as the CUDA build.
$(VENV)/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist
