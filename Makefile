# make demo   text in, a pretrained, fine-tuned, measured and exported model out, in minutes
# make test   linters, type checker and tests; make test-all: also those that take half a minute each, and more examples of each property
# make coverage   the quick tests, with the lines they do not reach; make docs: the documentation as a site, in site/
# Each makes .venv first, with the exact versions of constraints.txt; nothing else to type.
#
# On a machine without a GPU, the small build of torch saves gigabytes:
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
# Another Python or torch than the pinned one, in a fresh checkout:
#   make pytest PYTHON=python3.13 TORCH='torch==2.11.*'

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
PINNED := $(shell grep '^torch==' constraints.txt)
TORCH ?= $(PINNED)
# Every torch for CUDA asks for its own Triton; that of constraints.txt goes with the torch there.
FREE := torch==$(if $(filter-out $(PINNED),$(TORCH)),|triton==)
BIN := .venv/bin
# Three processes, since tests that start others wait a fifth of the time, of one thread each, so that they do not fight for the cores; whole files, so that
# their fixtures are made once, in the order of their names, since files of one long test would else come last; what was compiled is kept, also where
# Python is told not to.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-all pytest coverage docs lint format install clean
.DEFAULT_GOAL := demo

demo: .venv/installed
	$(BIN)/overnight run demo

# Side by side: most of the time the type checker has a core of its own.
test: .venv/installed
	@$(MAKE) --no-print-directory -j2 lint pytest

test-all: lint
	$(PYTEST) --hypothesis-profile=all $(PYTEST_ARGS)

# The tests alone, as on every other Python and torch, where the linters would say the same.
pytest: .venv/installed
	$(PYTEST) -m "not heavy" $(PYTEST_ARGS)

# The floor is in pyproject.toml; lines that only a GPU or a child process reaches count as missed.
coverage: .venv/installed
	$(PYTEST) -m "not heavy and not slow" --cov --cov-report=term-missing:skip-covered $(PYTEST_ARGS)

docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: .venv/installed

# All targets install the same, because the demo's text is the documentation of what is installed.
# torch goes first and exact: an open range would choose a newer one, and with it gigabytes of CUDA.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"overnight needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	@{ grep -v -E '^($(FREE))' constraints.txt; echo '$(TORCH)'; } > .venv/constraints.txt
	$(BIN)/python -m pip install -q $(PIP_ARGS) '$(TORCH)' -c .venv/constraints.txt
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c .venv/constraints.txt -e '.[dev]'
	@touch $@

.venv/installed-docs: .venv/installed
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c .venv/constraints.txt -e '.[docs]'
	@touch $@

clean:
	rm -rf .venv build dist site .coverage *.egg-info .pytest_cache .ruff_cache .hypothesis
	find overnight tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
