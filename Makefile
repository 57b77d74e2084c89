# Two commands do everything on a fresh clone: make demo, make test. Each makes .venv first if it is not there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all test-trainers test-torch test-newest check format docs dist gpu soak bench clean

demo: $(VENV)/ready
	$(BIN)/ebbtide demo

# Each file runs in one process. Tensors are too small for a second core, and some tests wait for processes of their
# own: hence one process more than two cores.
JOBS ?= 3

# Each matrix at its edges, of long tests one case or none (tests/README.md); test-all is all of it, and the trainers.
test: $(VENV)/ready
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

test-all: $(VENV)/ready
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --all
	$(MAKE) -j3 test-trainers

# Trainers whose pins conflict with the suite's environment, or whose presence changes what others do there: each
# beside it, without dependencies of its own.
TRAINERS := torchtune axolotl fastvideo torchtitan deepspeed xformers megatron megatron-newest

test-trainers: $(TRAINERS:%=test-with-%)

test-with-%: .trainers/%/ready
	PYTHONPATH=.trainers/$* $(BIN)/python -W ignore -c "import $*"
	PYTHONPATH=.trainers/$* $(BIN)/python -m pytest --all tests/trainers/test_$*.py

# Where there is no CUDA, its tests have to prepare what it imports.
test-with-fastvideo: .trainers/fastvideo/ready
	PYTHONPATH=.trainers/fastvideo $(BIN)/python -m pytest --all tests/trainers/test_fastvideo.py

PIP_FLAGS :=
# Offered to Python 3.12 and later; all but a helper for data sets is Python that 3.11 runs.
.trainers/megatron-newest/ready: PIP_FLAGS := --python-version 3.12 --only-binary=:all: --ignore-requires-python
test-with-megatron-newest: .trainers/megatron-newest/ready
	PYTHONPATH=.trainers/megatron-newest $(BIN)/python -m pytest --all tests/trainers/test_megatron.py

.trainers/%/ready: tests/trainers/%.txt $(VENV)/ready
	$(BIN)/python -m pip install -q --no-deps $(PIP_FLAGS) --upgrade --target .trainers/$* -r $<
	touch $@

# The suite, or TESTS of it, on another release of torch, which lies beside the environment and hides its own: make
# test-torch TORCH=2.12.0. Some GB, for most indexes have builds with CUDA only; they run without a GPU too.
TORCH ?= 2.12.0
TESTS ?= tests
CASES ?= --all

test-torch: .torch/$(TORCH)/ready
	PYTHONPATH=$(CURDIR)/.torch/$(TORCH) $(BIN)/python -c "import torch; assert (torch.__version__ + '+').startswith('$(TORCH)+')"
	PYTHONPATH=$(CURDIR)/.torch/$(TORCH) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(CASES) $(TESTS)

.torch/%/ready: $(VENV)/ready
	$(BIN)/python -m pip install -q --upgrade --target .torch/$* torch==$*
	touch $@

# What pip brings today, with what of the suite leans on torch, each matrix at its edges: another release breaks calls of
# torch, not one case of ours. All of it: make test-torch TORCH=2.15.0.
NEWEST := 2.15.0
LEANS_ON_TORCH := $(addprefix tests/, engine stores recompute compat devices model test_compile.py test_context.py \
	test_offload.py test_examples.py integrations/test_fused.py integrations/test_transformers.py)

test-newest:
	$(MAKE) test-torch TORCH=$(NEWEST) TESTS="$(LEANS_ON_TORCH)" CASES=

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python -m benchmarks.tables --check
	$(BIN)/towncrier build --draft --version next > /dev/null

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python -m benchmarks.tables

# The site, in build/site. A page or link that is wrong fails. mkdocs would advertise its successor.
docs: $(VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Wheel and sdist, in dist/, checked and installed beside a torch that has to stay as it is.
dist: $(VENV)/ready
	$(BIN)/python .ci/wheel.py

# On a machine with an accelerator, in an environment that has torch, transformers and pytest.
gpu:
	PYTHONPATH=src:. $(PYTHON) -m pytest --all -m gpu tests/gpu
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.run

# Random steps with faults in one process: none may differ, no counter may grow.
soak: $(VENV)/ready
	PYTHONPATH=src:tests:. $(BIN)/python -m benchmarks.soak
	$(BIN)/python -m benchmarks.bars
	$(BIN)/python -m benchmarks.tables

# The figures that need no accelerator.
bench: $(VENV)/ready
	PYTHONPATH=src:tests:. $(BIN)/python -m benchmarks.without_gpu
	$(BIN)/python -m benchmarks.tables

# torch first and alone: asked for by another package it could arrive as another release, or another build of this one.
$(VENV)/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .torch .trainers .pytest_cache .ruff_cache .hypothesis build dist
