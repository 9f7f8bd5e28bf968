# Every target starts from nothing: the first one run makes .venv, later ones reuse it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Small, quiet and repeatable: no accelerator is probed, no thread pool outgrows the machine, and DeepSpeed
# keeps what it compiles in the environment.
export DS_ACCELERATOR ?= cpu
export OMP_NUM_THREADS ?= 1
export TORCH_EXTENSIONS_DIR ?= $(abspath $(VENV))/torch_extensions
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: demo test check crash deaths soak sanitize fuzz judge bench matrix clean

demo: $(VENV)/package.stamp
	$(BIN)/python examples/demo.py

test: check
	$(BIN)/python -m pytest

check: $(VENV)/package.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The protocol: every state of the models, and every power cut on a modelled disk; then production with one fsync less
# or two steps exchanged, and what real saves asked the kernel for (this needs strace). Prints how many.
crash: $(VENV)/package.stamp
	$(BIN)/python -m tests.model
	$(BIN)/python -m pytest -v tests/test_crash.py
	$(BIN)/python -m tests.crash

# A death and a stop of each process at the start and the end of every span: one line per case. WORDS="publish kill"
# picks those whose line holds all of the words.
deaths: $(VENV)/package.stamp
	$(BIN)/python tests/deaths.py $(WORDS)

# Random deaths for MINUTES, one line per incident; SEED repeats the choice of victims.
MINUTES ?= 10
soak: $(VENV)/package.stamp
	$(BIN)/python tests/soak.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

bench: $(VENV)/package.stamp
	$(BIN)/python benchmarks/stall.py

matrix: $(VENV)/package.stamp
	$(BIN)/python benchmarks/matrix.py

# The native part under ASan, UBSan and TSan, which must first find bugs that are sown. Needs g++ and its libraries.
sanitize: $(VENV)/package.stamp
	$(BIN)/python -m tests.sanitize

# The tests with random input, with twenty times the examples of `make test`.
fuzz: $(VENV)/package.stamp
	HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -m hypothesis

# An outside judge, ckpt-chaos from PyPI in an environment of its own, kills trainer and saver at file events.
judge: $(VENV)/package.stamp
	$(BIN)/python -m tests.judge

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis ckpt_engine/_C.*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/requirements.stamp: requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -r requirements-dev.txt
	touch $@

# The requirements are there already and pinned, so the package resolves nothing.
$(VENV)/package.stamp: $(VENV)/requirements.stamp pyproject.toml setup.py $(wildcard csrc/*)
	$(BIN)/pip install --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $@
