# Each target makes its own environment first: nothing is installed outside $(VENV).
#   make test ARGS="-k scatter"          arguments for pytest (or for the example, or the benchmark)
#   make test PYTHON=python3.12 VENV=.venv312
#   make mnist ACCELERATOR=              on the CPU, whatever the machine has

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

# The extra that drives this machine's accelerator. CUDA 13 needs driver 580 and compute capability 7.5, CUDA 12 runs on
# less. A TPU is a PCI device of Google's with a device file (Google's network cards have none).
ACCELERATOR ?= $(shell \
	nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2>/dev/null | awk -F', *' ' \
		/^[0-9]+\./ { found = 1; if ($$1 + 0 < 580 || $$2 + 0 < 7.5) old = 1 } \
		END { if (found) print (old ? "cuda12" : "cuda13"); exit !found }' || \
	{ grep -qs 0x1ae0 /sys/bus/pci/devices/*/vendor && { test -e /dev/accel0 || test -e /dev/vfio/0; } && echo tpu; })

comma := ,
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help mnist test test-full test-faults coverage test-ray install lint ruff pyright types draw docs lock wheel release bench clean

help:  ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

mnist: INSTALLED = $(VENV)/.installed-examples$(addprefix $(comma),$(strip $(ACCELERATOR)))
mnist:  ## train a Flax CNN on MNIST, on every device of this machine
	@echo "A small network learns handwritten digits on every device here, and draws a picture: up to a minute on two busy cores."
	@test -e $(INSTALLED) || echo "Before that, once: an environment in $(VENV), and JAX into it, which takes 1 to 3 minutes."
	@$(MAKE) --no-print-directory $(INSTALLED)
	$(VENV)/bin/python examples/mnist.py $(ARGS)

test: install  ## run the fast tests, on 8 virtual CPU devices: every verb, door, bad input and law once
	$(VENV)/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(ARGS)

test-full: install  ## run the other tests: every combination, and what takes longer
	$(VENV)/bin/python -m pytest -m "(full or hypothesis) and not faults" -n auto --maxprocesses 4 --dist loadfile $(ARGS)

test-faults: install  ## kill, stop and damage processes and checkpoints, and see that nothing hangs or is lost
	$(VENV)/bin/python -m pytest -m faults -n 4 $(ARGS)

coverage: install  ## run the fast tests, and write which lines of jdp/ they run into build/coverage
	$(VENV)/bin/python -m pip install --quiet "pytest-cov>=6"
	$(VENV)/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile --cov jdp --cov-report term:skip-covered \
		--cov-report html:build/coverage $(ARGS)

test-ray:  ## train by Ray Train, kill a worker, take a node away; in an environment of its own, of 1.3 GB
	@$(MAKE) --no-print-directory VENV=$(VENV)-ray $(VENV)-ray/.installed-test,ray
	$(VENV)-ray/bin/python -m pytest tests/launchers -m ray -n 0 $(ARGS)

install: $(VENV)/.installed-test  ## make the environment the tests run in

lint: ruff pyright types  ## check style and format (ruff), types (pyright, mypy), prose, and the drawings of docs/
	$(VENV)/bin/python tests/repository/prose.py
	$(VENV)/bin/python docs/architecture.py --check
	$(VENV)/bin/python docs/pictures.py --check

ruff: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check --quiet

pyright: $(VENV)/.installed-dev
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python jdp

types: $(VENV)/.installed-dev
	$(VENV)/bin/python tests/types/check.py

draw: $(VENV)/bin/python  ## draw docs/architecture.md from the code, and the pictures of the pages
	$(VENV)/bin/python docs/architecture.py
	$(VENV)/bin/python docs/pictures.py

docs: draw $(VENV)/.installed-docs  ## build the site into build/site
	$(VENV)/bin/python -m sphinx --quiet --fresh-env --write-all --fail-on-warning --keep-going docs build/site
	@echo "The site is in build/site: open build/site/index.html."

lock: $(VENV)/bin/python  ## write requirements.lock: what the tests run with, one version of each, by uv
	$(VENV)/bin/python -m pip install --quiet uv
	$(VENV)/bin/uv pip compile pyproject.toml --extra test --universal --generate-hashes --no-header --no-annotate \
		--quiet --output-file requirements.lock $(ARGS)

wheel: $(VENV)/bin/python  ## build the wheel into dist/
	$(VENV)/bin/python -m pip wheel --no-deps --wheel-dir dist .

release: $(VENV)/.installed-release  ## build what would be published into dist/, check it, and stop
	rm -rf dist
	$(VENV)/bin/python -m build --outdir dist
	$(VENV)/bin/python -m twine check --strict dist/*
	.ci/wheel $(PYTHON) dist/*.whl
	@awk '/^## /{ in_it = /Unreleased/ } in_it && /^\* /{ n++ } END { if (n) print "CHANGELOG.md has " n " entries under [Unreleased]: give them a version and a date, and pyproject.toml that version." }' CHANGELOG.md
	@test -z "$$(git status --porcelain)" || echo "There are changes that are not committed."
	@echo "Built and checked, in dist/:" dist/*
	@echo "Nothing was published: that is done by hand."

bench: $(VENV)/.installed-test  ## compare calls and training steps with hand-written programs
	$(VENV)/bin/python benchmarks/overhead.py --write $(ARGS)
	$(VENV)/bin/python benchmarks/train.py --write $(ARGS)
	$(VENV)/bin/python benchmarks/criterion.py --write $(ARGS)
	$(VENV)/bin/python benchmarks/shard.py --write $(ARGS)
	$(VENV)/bin/python benchmarks/mesh.py --write $(ARGS)
	$(VENV)/bin/python benchmarks/deterministic.py --write $(ARGS)
	$(VENV)/bin/python benchmarks/processes.py --write $(ARGS)
	$(VENV)/bin/python benchmarks/host_cost.py --write $(ARGS)
	$(VENV)/bin/python benchmarks/leaves.py --write $(ARGS)
	$(VENV)/bin/python benchmarks/faults.py --write $(ARGS)
	-$(VENV)/bin/python -m pip install --quiet --requirement benchmarks/requirements.txt
	$(VENV)/bin/python benchmarks/peers.py --write $(ARGS)
	$(VENV)/bin/python benchmarks/gpu.py
	-$(VENV)/bin/python -m pip install --quiet --editable ".[plan-gpu,plan-tpu]"
	$(VENV)/bin/python benchmarks/overlap.py --write $(ARGS)
	$(VENV)/bin/python benchmarks/shard.py --compiled --write

clean:  ## remove the environment and all that was built
	rm -rf $(VENV) $(VENV)-ray build dist .pytest_cache .ruff_cache .hypothesis .jax_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# `.installed-X` says that the package is installed, editable, with the extras X, as pyproject.toml has them now.
$(VENV)/.installed-%: pyproject.toml $(VENV)/bin/python
	$(VENV)/bin/python .ci/pip --editable ".[$*]"
	@touch $@

# A virtual environment, since Debian's own Python refuses to install packages (PEP 668); and Debian's venv lacks its
# second half unless python3-venv is there.
$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON) here. Install Python 3.11 or newer, or name one: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "jdp needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1). Name a newer one: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments yet. On Debian or Ubuntu: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
