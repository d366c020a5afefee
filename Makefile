# One command sets up the environment and runs the paper: make repro. Another runs the tests: make test.
# Everything happens in .venv, activated or not; the folder's name may hold spaces; only `setup` needs a network.
PY ?= python3
WORKERS ?= 2
PYTHON := .venv/bin/python
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export JUPYTER_PREFER_ENV_PATH := 1
export DVC_NO_ANALYTICS := 1
export HF_HUB_OFFLINE := 1
export MPLBACKEND := agg

.DEFAULT_GOAL := help
.PHONY: help setup data repro plan test test-slow check sync export docs clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 20

setup:  ## make .venv with the exact versions of requirements.lock (6 GB, about 5 minutes; again only when they change)
	@cat pyproject.toml requirements.lock | cmp -s - .venv/.installed && test -x $(PYTHON) || { \
	test -x $(PYTHON) || { \
	  command -v $(PY) >/dev/null || { echo "there is no $(PY); name a Python of 3.11 or newer: make setup PY=python3.12"; exit 1; }; \
	  $(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PY) is `$(PY) -V 2>&1`, needed is 3.11 or newer; name one: make setup PY=python3.12"; exit 1; }; \
	  $(PY) -m venv .venv || { echo "$(PY) cannot make environments; install its venv package (Debian: python3-venv)"; exit 1; }; }; \
	echo "installing into .venv: 6 GB, about 5 minutes"; \
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[dev]' && \
	cat pyproject.toml requirements.lock > .venv/.installed; }

data: setup  ## restore data/ from dvcstore/
	@if test -f data.dvc; then $(PYTHON) -m dvc pull --quiet data.dvc; fi

repro: setup data  ## run the paper; TIER=smoke|small|paper chooses the size (without TIER: as params.yaml says)
	@set -e; tier="$$($(PYTHON) tools/tier.py $(TIER))"; echo "tier $$tier (make repro TIER=... for another)"; \
	$(PYTHON) -m dvc repro; \
	mkdir -p "results/$$tier"; cp params.yaml dvc.lock "results/$$tier/"; \
	echo "done: results/$$tier and reports/$$tier"

plan: setup  ## show what TIER would run, cost and need, without running it (MEASURE=5: from timed steps)
	@$(PYTHON) tools/plan.py $(if $(TIER),--tier $(TIER)) $(if $(MEASURE),--measure $(MEASURE))

test: setup data  ## the quick suite: every library notebook once, pytest, and whether nbs/ and afno/ agree
	@OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n $(WORKERS) --dist worksteal -m "not slow"; tests=$$?; \
	$(PYTHON) tools/check_sync.py && exit $$tests

test-slow: setup data  ## what takes minutes
	@$(PYTHON) -m pytest -q -m slow

check: setup sync  ## lint, format, types, and whether nbs/, afno/ and README.md agree
	@$(PYTHON) -m ruff check nbs tools tests
	@$(PYTHON) -m ruff format --check nbs tools tests
	@.venv/bin/basedpyright
	@$(PYTHON) tools/readme.py --check

sync: setup
	@$(PYTHON) tools/check_sync.py

export: setup  ## write afno/ and README.md from nbs/, and clean the notebooks
	@.venv/bin/nbdev-export && .venv/bin/nbdev-clean && $(PYTHON) tools/readme.py

docs: setup data  ## build the site of all notebooks into _site/ (installs mkdocs the first time)
	@$(PYTHON) -c 'import mkdocs, mkdocs_jupyter, material' 2>/dev/null || \
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[docs]'
	@$(PYTHON) tools/docs.py && NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --quiet

clean:  ## remove work/ and caches; data, results, reports and DVC's cache stay
	@rm -rf work .pytest_cache .ruff_cache _docs _proc _site build dist
	@find reports -name '*.running.ipynb' -delete 2>/dev/null || true
	@find reports -name '*.failed.ipynb' -delete 2>/dev/null || true
	@find afno nbs tests tools -name __pycache__ -prune -exec rm -rf {} + -o -name .ipynb_checkpoints -prune -exec rm -rf {} +
