# Everything runs in a private .venv; the first target that needs it makes it.
PYTHON ?= python3
TORCH  := 2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TOOLS  := $(VENV)/.tools
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# The processes that tests start compile our modules once, whatever the environment says.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

.PHONY: train test proof lint types venv soak fuzz bench gpu clean
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help:
	@echo "make train   set up .venv and train the quickstart: 3 replicas x 2 ranks, one is killed and heals"
	@echo "make test    lint, types and all tests but the long ones"
	@echo "make proof   what takes longer: launchers, spares, drains, kills, replayed; twenty minutes or more"
	@echo "make bench   FTAR beside gloo, torchft and OpenMPI"
	@echo "make gpu     check and measure the kernels; train configs/gpu.yaml where there is a GPU"
	@echo "make soak    a rank dies at each named place, lost nodes, a storm, 300 random pairs of faults; some hours"
	@echo "make fuzz    a million made-up inputs for every parser of bytes from outside; about half an hour"
	@echo "make lint | types | venv | clean"

train: $(STAMP)
	$(BIN)/python launcher.py up configs/quickstart.yaml

# Tests that need no quiet run four at a time: much of their time is waiting. Then all others, nothing beside them.
test: lint types
	$(PYTEST) -n 4 --dist loadfile -m 'not proof and not soak and not multiproc'; one=$$?; \
	$(PYTEST) -m 'not proof and not soak and multiproc'; two=$$?; exit $$((one ? one : two))

# Long runs in real parts; twenty minutes or more.
proof: $(TOOLS)
	$(PYTEST) -m 'proof and not soak' --durations=15

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(TOOLS)
	$(BIN)/mypy

venv: $(TOOLS)

# A rank killed at each named place of the protocol, nodes lost in a row, a real Slurm, what the model checker takes
# longest for; then a thousand kills, stalls, half-open connections and stale callers. About forty minutes. Then random
# pairs of faults, about an hour; they go on where they were stopped, and their report is printed at any time by
# `.venv/bin/python tests/scenarios/pairs.py --pairs 0`.
PAIRS := --pairs 300 --seed 1
soak: $(TOOLS)
	$(PYTEST) -m soak --durations=15; one=$$?; \
	$(BIN)/python tests/ftar/storm.py --events 1000; two=$$?; \
	$(BIN)/python tests/scenarios/pairs.py $(PAIRS) --report runs/pairs.jsonl; three=$$?; \
	exit $$((one ? one : two ? two : three))

# A million made-up inputs for each parser of bytes from outside, within bounds on time and memory.
fuzz: $(TOOLS)
	$(BIN)/python tests/fuzz/fuzz.py

# FTAR beside gloo, torchft and OpenMPI; wants a quiet machine.
bench: $(TOOLS)
	$(PIP) install -q -e '.[bench]'
	$(BIN)/python launcher.py bench ftar --measure all

# Kernels, then two replicas on the one GPU. torch's CUDA builds bring triton along, its CPU builds do not.
gpu: $(STAMP)
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) install -q -e '.[gpu]'
	@mkdir -p runs
	$(BIN)/python -m ftar_kernels.bench --json runs/kernels.json
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	  then $(BIN)/python launcher.py up configs/gpu.yaml; \
	  else echo "no GPU here: what needs none was checked, configs/gpu.yaml was not trained"; fi

# What only developers need.
$(TOOLS): $(STAMP)
	$(PIP) install -q -e '.[dev]'
	@touch $@

# torch comes first and by itself, as one exact version: a range, resolved with everything else, would fetch
# several GB of CUDA packages.
$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q torch==$(TORCH)
	$(PIP) install -q -e .
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
