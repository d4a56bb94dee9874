# Everything a person or CI runs. Each target sets up what it needs; a second call finds it done.
#   make demo                       make run NB=01_decode P=full
#   make test PYTHON=python3.12     make test PY=python     (PY: use this interpreter as it is and install nothing)
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/installed
ifdef PY
READY :=
else
PY := $(VENV)/bin/python
READY := $(STAMP)
endif

P ?= smoke
WORKERS ?= 2
NOTEBOOKS := $(sort $(wildcard notebooks/*.ipynb))
# notebook.preset of every preset whose name starts with smoke.
SMOKE := $(sort $(patsubst notebooks/params/%.yaml,%,$(wildcard notebooks/params/*.smoke*.yaml)))
# What a run leaves in a notebook beyond outputs and counts.
STRIP := --extra-keys "metadata.papermill metadata.widgets cell.metadata.papermill cell.metadata.execution" \
	--drop-tagged-cells injected-parameters

# Search benchmarks: 2^20 bytes of the generated tries, and the .json file or folder of the record (a run folder if none).
MB ?= 1024
RECORD ?=

.PHONY: help env embedded demo test test-gpu bench-search lint format lab smoke run strip clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

env: $(READY)  ## make the virtual environment

$(STAMP): pyproject.toml .ci/setup_env.py
	@$(PYTHON) .ci/setup_env.py $(VENV) $(STAMP)

embedded: $(READY)  ## convert the embedded target model into the cache
	@$(PY) -m workbench.models.embedded > /dev/null

demo: embedded  ## decode with AR, DART, DFlash and DScale on the embedded model and write a report
	$(PY) -m workbench run notebooks/01_decode.ipynb --preset demo

# One thread a worker: the cores go to the workers.
test: embedded  ## all tests that need no GPU
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal

test-gpu: embedded  ## the tests that need a CUDA device
	$(PY) -m pytest -m gpu

# The generated tries go to a temporary folder that is removed whatever happens; TMPDIR says where.
bench-search: $(READY)  ## benchmark trie and search, in and out of cache (2 GB of temporary files, a few minutes)
	scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT; \
	TMPDIR=$$scratch OMP_NUM_THREADS=1 $(PY) -m pytest -q tests/bench/bench_search.py --trie-mb $(MB) --record "$(RECORD)" \
		--benchmark-columns=min,median,rounds --benchmark-group-by=func --benchmark-sort=name

lint: $(READY)  ## check style, imports and notebooks; changes nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"
	for notebook in $(NOTEBOOKS); do $(PY) -m nbstripout --verify $(STRIP) $$notebook || exit 1; done

format: $(READY)  ## format code and repair what can be repaired
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

lab: embedded  ## open JupyterLab on the notebooks
	$(PY) -m jupyter lab --notebook-dir notebooks

smoke: embedded  ## run every notebook with each of its smoke presets
	for preset in $(SMOKE); do \
		$(PY) -m workbench run notebooks/$${preset%%.*}.ipynb --preset $${preset#*.} || exit 1; done

run: embedded  ## run one notebook: make run NB=01_decode P=full
	@test -n "$(NB)" || { echo "name a notebook, as in: make run NB=01_decode P=full" >&2; exit 2; }
	$(PY) -m workbench run notebooks/$(basename $(notdir $(NB))).ipynb --preset $(P)

strip: $(READY)  ## remove outputs from the notebooks
	for notebook in $(NOTEBOOKS); do $(PY) -m nbstripout $(STRIP) $$notebook || exit 1; done

clean:  ## remove runs, builds and caches, but neither the environment nor the converted model
	rm -rf reports/runs build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find workbench kernels tests -name __pycache__ -type d -prune -exec rm -rf {} +
