# make train, make test, and little else. Everything is installed into .venv; nothing else on the machine is touched.

# The first Python on the path that is new enough.
PYTHON ?= $(firstword $(foreach p,python3 python3.11 python3.12 python3.13 python3.14, \
	$(shell $(p) -c 'import sys; sys.version_info >= (3, 11) and print("$(p)")' 2>/dev/null)))
VENV := .venv/bin
RUN := runs/demo
# Tests run without the plugins that packages such as Hydra bring: loading them takes two seconds in each.
PYTEST := $(VENV)/python -m pytest --disable-plugin-autoload -p xdist -p hypothesispytest --dist worksteal
# Container images set this variable, which would make each of hundreds of processes compile our modules again.
test test-slow test-all: export PYTHONDONTWRITEBYTECODE =

.PHONY: help setup train test test-slow test-all test-gpu mutations check format bench clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /	/' | expand -t 12

.venv/installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer on the path: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	@# Python compiles the modules that it imports; to compile all of them takes pip most of its time.
	$(VENV)/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/installed-dev: .venv/installed
	$(VENV)/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@# Tests start hundreds of processes. What they barely use is left out; a few files, such as templates, do not compile.
	@$(VENV)/python -m compileall -q -j 0 -x '/tests?/|/models/|/(pandas|scipy|sklearn|chardet|nltk|networkx|pip)/' \
		.venv/lib > /dev/null || true
	@touch $@

setup: .venv/installed-dev  ## create .venv and install everything into it, with what tests need

train: .venv/installed  ## prepare the embedded corpus, train a small log-space GPT, sample from it, evaluate it in brief
	$(VENV)/python scripts/prepare_data.py data=stdlib tokenizer=bytes out_dir=datasets/stdlib
	$(VENV)/python train.py experiment=quickstart run_dir=$(RUN)
	printf 'import os\n\n\nclass Parser:\n    def __init__(self' | \
		$(VENV)/python sample.py checkpoint=$(RUN) prompt=- max_new_tokens=400
	$(VENV)/python eval.py checkpoint=$(RUN) contexts=[1024] context_windows=8
	@printf '\nNext:\n'
	@printf '  %s\n' 'see $(RUN)/loss.png and $(RUN)/metrics.jsonl' \
		'source .venv/bin/activate' \
		'python eval.py checkpoint=$(RUN) batches=all                    # the whole split, and contexts up to 64K: minutes' \
		'python sample.py checkpoint=$(RUN) prompt="class Tree:" num_samples=3' \
		'python train.py experiment=quickstart run_dir=runs/longer max_steps=8000   # a longer run, with its own schedule' \
		'python train.py experiment=quickstart run_dir=runs/softmax model=softmax_1m                     # softmax attention' \
		'python train.py -m experiment=quickstart run_dir=runs/sweep optim.max_lr=3e-3,1e-2 seed=1,2'

test: setup  ## run the fast tests: some minutes on 2 cores
	$(PYTEST) -n 3 -m "not slow"

test-slow: setup  ## run the other tests: kills at every fsync and rename, long fuzzing, every script
	$(PYTEST) -n 3 -m slow --durations=20

test-all: setup  ## run all tests, as CI does
	$(PYTEST) -n 3

test-gpu: setup  ## run on a GPU all tests that can run there: minutes
	@$(VENV)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("error: torch sees no GPU here: run make test-gpu on a machine with one")'
	$(PYTEST) -n auto --maxprocesses 8 -m gpu -W default

mutations: setup  ## break the code in ten ways and check that a test of `make test` notices each
	$(VENV)/python tests/mutations.py

check: setup  ## lint, format and types
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy

bench: .venv/installed  ## time attention beside the published form and torch's own
	$(VENV)/python scripts/bench.py

format: setup  ## put every file into the project's format
	$(VENV)/ruff check --fix .
	$(VENV)/ruff format .

clean:  ## remove .venv and caches; datasets and runs stay
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
