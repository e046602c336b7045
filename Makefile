# Every target sets up what it needs first; the environment is .venv here.
#   make setup                      CPU builds (default)
#   make setup TORCH_BACKEND=auto EXTRAS=gpu,notebooks,verl     a machine with GPUs
PYTHON ?= python3
TORCH_BACKEND ?= cpu
EXTRAS ?= all,dev
UV_VERSION = 0.13.8
VENV ?= .venv
BIN = $(VENV)/bin
PYTEST = $(BIN)/python -m pytest
# uv does not read pip's own settings: hand on a folder of wheels where pip has one, else let uv pick torch's index.
FIND_LINKS := $(or $(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null))
TORCH = $(if $(wildcard $(FIND_LINKS)/torch-*),--find-links $(FIND_LINKS),--torch-backend $(TORCH_BACKEND))

.PHONY: setup demo test test-all lab bench services constraints clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

setup: $(VENV)/.done  ## make .venv with everything in it (seconds the second time)

$(VENV)/.done: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@# Compiled here once: imports of torch and vLLM, made by every process, take half as long.
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python $(TORCH) --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

services:  ## Redis, g++ and Chromium for the tests, where they may be installed
	@sh tests/services.sh

demo: setup  ## train a tool user from nothing on this machine, and open its story
	$(BIN)/rstar-lab demo

# Two files at a time, since half of the tests wait for processes to start. Real browsers, servers and engines on a machine
# that others use too: a failure is tried once more before it counts.
test: setup services  ## every test but the long soaks
	$(PYTEST) -m "not soak" -n 2 --dist loadfile --reruns 1 -raR --durations 40

test-all: setup services  ## the soaks and Slurm too
	HYPOTHESIS_PROFILE=explore $(PYTEST)

lab: setup  ## JupyterLab on the notebooks
	$(BIN)/jupyter lab --notebook-dir .

bench: setup  ## ratios against peers, each in one run
	for name in trainer sandbox rollout scheduler store verl; do $(BIN)/rstar-lab bench $$name; done

constraints:  ## resolve newer versions of everything
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --upgrade --quiet --no-header --no-annotate --no-emit-index-url --no-emit-find-links $(TORCH) \
	  | grep -vE '^(nvidia-|cuda-|torch==|torchaudio|torchvision|torchcodec|triton)' > constraints.new
	{ printf '%s\n' '# Versions that were tested together; made by `make constraints`. torch: the CPU or CUDA build of the same version.' 'torch==2.13.0'; cat constraints.new; } > constraints.txt
	rm constraints.new

clean:  ## remove the environment and what runs left behind
	rm -rf $(VENV) out runs
