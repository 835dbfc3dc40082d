# Everything runs in the project's own .venv; what is up to date is not made again.
#   make demo | test | bench | lint | venv | clean
PYTHON ?= python3
# The release that the compilers below it were tried with. A CPU-only wheel saves a large download on Linux:
#   make demo PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
TORCH ?= torch==2.13.0
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test bench lint venv clean

venv: $(READY)

# The virtual environment is made without pip and filled from outside: Debian's python3 has no ensurepip.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "attnrewrite needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --python $(BIN)/python install --quiet pip '$(TORCH)' -e '.[dev]'
	@touch $@

test: venv
	$(BIN)/python -m pytest -n $(JOBS)

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf $(VENV) out build dist *.egg-info
