# All targets run in a private .venv. The first target that needs it creates it.
PYTHON ?= python3
TORCH  := 2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TOOLS  := $(VENV)/.tools
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# Let the processes that tests start write compiled modules, whatever the environment says: it saves start-up time.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

# Trainers of others that ft_hsdp plugs into: examples/NAME is the example, tests/integrations/test_NAME.py its test.
FRAMEWORKS := fabric accelerate transformers torchtitan ray_train

# The environment with torchft's nightly.
NIGHTLY := .venvs/torchft-nightly

.PHONY: train unit test proof lint types venv integrations compatibility torchft-nightly twin soak fuzz faults bench gpu docs clean
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help:
	@echo "make train   set up .venv and train the quickstart: 3 replicas x 2 ranks, one is killed and heals"
	@echo "make unit [PKG=core]   the tests of one package without those that start ranks; seconds for core, memory, lighthouse/quorum"
	@echo "make test    lint, types and all tests but the long ones"
	@echo "make proof   the longer tests: launchers, spares, drains and kills, verified by replay; twenty minutes or more"
	@echo "make docs    build the documentation into docs/_build"
	@echo "make bench   FTAR beside gloo and torchft"
	@echo "make gpu     check and measure the kernels; train configs/gpu.yaml if there is a GPU"
	@echo "make integrations   test the examples of other trainers, each in an environment of its own: $(FRAMEWORKS)"
	@echo "make torchft-nightly [NIGHTLY=FOLDER]   test ft_hsdp with torchft's nightly, in an environment of its own in FOLDER"
	@echo "make twin [TORCH=2.15.0] PYTHON=python3.12   check what a GPU machine would run, without the GPU; fetches 5 GB"
	@echo "make compatibility  train each kind of script of docs/compatibility.md in a job, and with torch alone"
	@echo "make soak    kill a rank at each failpoint, lose nodes, 1000 ring failures, 300 random pairs of faults; some hours"
	@echo "make fuzz    a million random inputs for each parser of bytes from outside; about half an hour"
	@echo "make faults  put each fault of tests/support/faults.txt into a copy of the source: a test must fail; about five minutes"
	@echo "make lint | types | venv | clean"

train: $(STAMP)
	$(BIN)/python launcher.py up configs/quickstart.yaml

# For the loop of edit and test. The pure packages start no process: core, memory, analysis, lighthouse/quorum and others.
PKG := core
unit: $(TOOLS)
	$(PYTEST) -q -m 'not proof and not soak and not integration and not multiproc' tests/$(PKG)

# Tests that do not depend on time run four at a time, long files first (tests/conftest.py has the order). All other
# tests run two at a time after them: they mostly wait. Each run prints its ten slowest.
SLOWEST := --durations=10 --durations-min=1
test: lint types
	$(PYTEST) -n 4 --dist loadfile --no-loadscope-reorder $(SLOWEST) \
	  -m 'not proof and not soak and not integration and not multiproc'; one=$$?; \
	$(PYTEST) -n 2 --dist worksteal $(SLOWEST) -m 'not proof and not soak and not integration and multiproc'; two=$$?; \
	exit $$((one ? one : two))

# Long runs with real launchers and processes, two at a time; twenty minutes or more. Then two of the other trainers,
# and the kernels with an older triton.
proof: $(TOOLS)
	$(PYTEST) -n 2 --dist worksteal $(SLOWEST) -m 'proof and not soak'; one=$$?; \
	$(MAKE) --no-print-directory integration-fabric integration-transformers old-triton; two=$$?; exit $$((one ? one : two))

integrations: $(FRAMEWORKS:%=integration-%)

integration-%: .venvs/%/.installed
	PYTHONDONTWRITEBYTECODE= .venvs/$*/bin/python -m pytest -n 2 -m integration \
	  $(wildcard tests/integrations/test_$*.py tests/integrations/test_$*_*.py)

# Our tests of torchft, and the nightly's own with our process group. Delete the folder for a newer nightly.
torchft-nightly: $(NIGHTLY)/.installed
	$(NIGHTLY)/bin/python -m pip --disable-pip-version-check list 2>/dev/null | grep -i '^torch'
	PYTHONDONTWRITEBYTECODE= $(NIGHTLY)/bin/python -m pytest -m 'proof or not proof' tests/compat \
	  -W 'ignore:unclosed <socket:ResourceWarning'

# The environment of a trainer lies on top of $(VENV): it takes torch and ft_hsdp from there.
.PRECIOUS: .venvs/%/.installed
.venvs/%/.installed: examples/%/requirements.txt $(TOOLS)
	$(call on-top,.venvs/$*)
	.venvs/$*/bin/python -m pip --disable-pip-version-check install -q -c .venvs/$*/constraints.txt -r $<
	@touch $@

$(NIGHTLY)/.installed: $(TOOLS)
	$(call on-top,$(NIGHTLY))
	$(NIGHTLY)/bin/python -m pip --disable-pip-version-check install -q -c $(NIGHTLY)/constraints.txt torchft-nightly
	$(NIGHTLY)/bin/python -c 'import torchft.reconfigure_test'
	@touch $@

# What a GPU machine without a package registry has, without the GPU: its torch, its triton, and neither ray nor torchft.
# It fetches some 5 GB once; `make twin TORCH=VERSION` takes another torch. It wants a python3.12: PYTHON names it.
twin: TORCH = 2.11.0
twin:
	$(MAKE) --no-print-directory .venvs/twin-$(TORCH)/.installed
	PYTHONDONTWRITEBYTECODE= .venvs/twin-$(TORCH)/bin/python -m pytest -m 'integration or not integration' tests/twin \
	  tests/ftar_kernels $(patsubst %,tests/train/test_%.py,unused fsdp gradients adopt)

.PRECIOUS: .venvs/twin-%/.installed
.venvs/twin-%/.installed: tests/twin/requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
	  { echo "$(PYTHON) is older than 3.12, which the twin has; name it: make twin PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venvs/twin-$*
	.venvs/twin-$*/bin/python -m pip --disable-pip-version-check install -q torch==$* -r $<
	.venvs/twin-$*/bin/python -m pip --disable-pip-version-check install -q --no-deps -e .
	@touch $@

# The kernels as the oldest triton compiles and launches them, beside this environment's torch.
.PHONY: old-triton
old-triton: .venvs/triton-3.6.0/.installed
	PYTHONPATH=.venvs/triton-3.6.0 $(BIN)/python -m benchmarks.kernels.compile_check

.venvs/triton-%/.installed: $(TOOLS)
	$(PIP) install -q --no-deps --target .venvs/triton-$* triton==$*
	@touch $@

# Make the environment $(1) on top of $(VENV), with a constraint that keeps its torch.
define on-top
$(PYTHON) -m venv $(1)
cd $(1)/lib/python3*/site-packages && \
  echo 'import site; site.addsitedir("$(CURDIR)/$(VENV)/lib/'$$(basename $$(dirname $$PWD))'/site-packages")' > ft_hsdp.pth
echo 'torch==$(TORCH)' > $(1)/constraints.txt
endef

# Each kind of training script in a job, beside plain torch; about five minutes. docs/compatibility.md tells it.
compatibility: $(TOOLS)
	$(PYTEST) -m '' tests/compatibility

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select DOC402,DOC501 .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(TOOLS)
	$(BIN)/mypy

venv: $(TOOLS)

# First the soak tests (a rank killed at each failpoint, nodes lost, a real Slurm, the largest spaces of
# the model checker, 600 random losses on machines) and 1,000 ring failures: kills, stalls, half-open connections.
# More than two hours.
# Then random pairs of faults, about an hour. An interrupted run of pairs continues where it stopped; this prints its
# report at any time: `.venv/bin/python tests/scenarios/pairs.py --pairs 0`.
PAIRS := --pairs 300 --seed 1
soak: $(TOOLS)
	$(PYTEST) -m soak --durations=15; one=$$?; \
	$(BIN)/python tests/ftar/storm.py --events 1000; two=$$?; \
	$(BIN)/python tests/scenarios/pairs.py $(PAIRS) --report runs/pairs.jsonl; three=$$?; \
	exit $$((one ? one : two ? two : three))

# A million random inputs for each parser of bytes from outside, with bounds on time and memory.
fuzz: $(TOOLS)
	$(BIN)/python tests/fuzz/fuzz.py

# Each fault breaks one guarantee in a copy of the source; its tests must fail.
faults: $(TOOLS)
	$(BIN)/python tests/support/faults.py

# The documentation site. It needs no network and no GPU; a warning is an error.
docs: $(TOOLS)
	$(BIN)/python -m sphinx -E -a -W --keep-going -q -b html docs docs/_build
	@echo "open docs/_build/index.html"

# FTAR beside gloo and torchft. Use a machine on which nothing else runs.
bench: $(TOOLS)
	$(BIN)/python launcher.py bench ftar

# The kernels, and a job of two replicas on one GPU. Without .venv it runs with $(PYTHON) as it is, and fetches nothing.
gpu: GPU_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu:
	@$(GPU_PYTHON) -c 'import torch, triton' || { echo "$(GPU_PYTHON) has no torch or no triton: pip install triton"; exit 1; }
	$(GPU_PYTHON) -m benchmarks.kernels --out runs/kernels

# The tools for developers.
$(TOOLS): $(STAMP)
	$(PIP) install -q -e '.[dev]'
	@touch $@

# Install torch first and by itself, as one exact version: a range that pip resolves together with the other packages
# fetches several GB of CUDA packages.
$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q torch==$(TORCH)
	$(PIP) install -q -e .
	@touch $@

clean:
	rm -rf $(VENV) .venvs build dist docs/_build docs/_generated *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
