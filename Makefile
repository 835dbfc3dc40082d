# Everything runs in the project's own .venv; what is up to date is not made again.
#   make demo | test | fuzz | bench | lint | venv | clean
PYTHON ?= python3
# The release that the compilers below it were tried with. A CPU-only wheel saves a large download on Linux:
#   make demo PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
TORCH ?= torch==2.13.0
JOBS ?= $(shell nproc 2> /dev/null || echo 2)

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := out/demo
DIGITS := --input-size 1x64x64 --mean 0.5 --std 0.5
BUILDABLE = $(shell $(BIN)/attnrewrite targets --json | $(BIN)/python -c 'import json, sys; \
	print(*[t["name"] for t in json.load(sys.stdin)["targets"] if t["build"] is True])')

.PHONY: demo test fuzz bench lint venv clean

demo: venv
	$(BIN)/python examples/digits.py --out $(DEMO)/digits
	$(BIN)/attnrewrite convert examples/digits.py:digits_vit --checkpoint examples/digits_vit.safetensors $(DIGITS) \
		--variant l1 --calibrate $(DEMO)/digits/calibration.npz --out $(DEMO)/l1 --force
	$(BIN)/attnrewrite evaluate $(DEMO)/l1 --data $(DEMO)/digits/test.npz
	for target in $(BUILDABLE); do \
		$(BIN)/attnrewrite lower $(DEMO)/l1 --target $$target --out $(DEMO)/$$target --force || exit; done
	$(BIN)/attnrewrite compare original=examples/digits.py:trained_digits_vit l1=$(DEMO)/l1 $(DIGITS) \
		--target host --target arm-cpu --target gpu --target coreml-npu \
		--data $(DEMO)/digits/test.npz --out $(DEMO)/comparison --force
	cp $(DEMO)/comparison/report.html $(DEMO)/report.html
	@echo "the report: $(DEMO)/report.html"

test: venv
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# Ten thousand damaged files, then ten thousand attentions that nobody wrote, each disturbed somewhere, and two thousand
# of them as ONNX files; another SEED draws others.
SEED ?= 1
fuzz: venv
	ulimit -v 16000000; PYTHONPATH=tests/helpers timeout 4h $(BIN)/python -m fuzz --cases 10000 --seed $(SEED) --jobs $(JOBS)
	ulimit -v 16000000; ATTNREWRITE_FUZZ=$(SEED) timeout 8h $(BIN)/python -m pytest -n $(JOBS) \
		tests/patterns/test_disturbed.py tests/patterns/onnx/test_disturbed_files.py -k drawn

bench: venv
	$(BIN)/python examples/train_digits_vit.py --check
	$(BIN)/python benchmarks/explain_speed.py
	$(BIN)/python benchmarks/detection.py

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

venv: $(READY)

# The virtual environment is made without pip and filled from outside: Debian's python3 has no ensurepip.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"attnrewrite needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --python $(BIN)/python install --quiet pip '$(TORCH)' -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) out build dist *.egg-info
