# make demo   text in, a pretrained, fine-tuned, measured and exported model out, in minutes
# make test   linters, type checker and tests; make test-all: also those that take half a minute each
# Both make .venv first, with the exact versions of constraints.txt; nothing else to type.
#
# On a machine without a GPU, the small build of torch saves gigabytes:
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
BIN := .venv/bin

.PHONY: demo test test-all lint format install clean
.DEFAULT_GOAL := demo

demo: .venv/installed
	$(BIN)/overnight run demo

# One thread for each of the two test processes, so that they do not fight for the cores; whole files, so that their fixtures are made once.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not heavy" $(PYTEST_ARGS)

test-all: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: .venv/installed

# Both targets install the same, because the demo's text is the documentation of what is installed.
# torch goes first and exact: an open range would choose a newer one, and with it gigabytes of CUDA.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"overnight needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q $(PIP_ARGS) "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find overnight tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
