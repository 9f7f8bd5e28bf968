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

.PHONY: demo test check crash deaths soak sanitize fuzz judge compat bench bench-full bench-peers figures matrix clean

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

# The figures of README and docs/performance.md. RESULTS: where rows and pictures go.
RESULTS ?= bench-results
SWEEP ?= --most-tensors 2000
PLAN ?=
bench: $(VENV)/package.stamp
	mkdir -p $(RESULTS)
	$(BIN)/python benchmarks/plan.py $(PLAN) --json $(RESULTS)/plan.json
	$(BIN)/python benchmarks/stall.py $(SWEEP) --json $(RESULTS)/stall.json --plot $(RESULTS)
	$(BIN)/python benchmarks/steps.py --json $(RESULTS)/steps.json
	$(BIN)/python benchmarks/persist.py --json $(RESULTS)/persist.json
	$(BIN)/python benchmarks/restore.py --json $(RESULTS)/restore.json
	$(BIN)/python benchmarks/report.py $(RESULTS)/*.json

# The same, the sweeps up to 4 GiB and 20,000 tensors, and 1 to 8 ranks that hold 2 GiB in all.
bench-full:
	$(MAKE) bench SWEEP="--most-tensors 20000 --sizes 64 256 1024 4096" PLAN="--tensors 10 100 1000 4000 20000"
	$(BIN)/python benchmarks/scale.py --json $(RESULTS)/scale.json
	$(BIN)/python benchmarks/report.py $(RESULTS)/*.json

# What bench and bench-peers have measured, into the papers.
figures: $(VENV)/package.stamp
	$(BIN)/python benchmarks/plots.py $(wildcard $(RESULTS)/*.json) --plot docs/figures
	$(BIN)/python benchmarks/report.py $(wildcard $(RESULTS)/*.json) --readme README.md --docs docs/performance.md \
		--figures docs/figures

# Against the rivals from PyPI: each in an environment of its own, .venv-peers/<peer>, with what benchmarks/peers pins.
# One that cannot be installed is a row that says why.
bench-peers: $(VENV)/package.stamp
	$(BIN)/python benchmarks/install_peers.py --python $(PYTHON)
	mkdir -p $(RESULTS)
	$(BIN)/python benchmarks/stall.py systems --peers --json $(RESULTS)/peers.json --plot $(RESULTS)/peers
	$(BIN)/python benchmarks/report.py $(RESULTS)/peers.json

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

# The tests of the integrations with older lines of transformers, Accelerate and Lightning. WORDS="lightning 2.5" picks.
compat: $(VENV)/package.stamp
	$(BIN)/python tests/compat.py $(WORDS)

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
