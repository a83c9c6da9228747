# make demo                  install what it needs, then: synthetic data -> Parquet -> balanced batches on 4 processes, a table and a plot
# make test                  install what is missing, run the tests; `check`, `package` and `docs` install their tools, too
# make test-fast             the tests that start no processes, in under a minute
# make check                 formatting, lint and types
# make check-imports         that editors find every import: half a minute more, so CI runs it and `make check` does not
# make fix                   format, and fix what lint can fix
# make package               build the sdist and the wheel, and try the wheel in an empty environment
# make coverage              run the tests, and report which lines of the packages they run; at least 90 % have to be
# make docs                  build the documentation into site/, and check every link in it; `make docs-serve` shows it as you write
# make test-examples         run the examples of one file, and compare what they print; `make package` does it from the wheel
# make test-torch            the tests that depend on the release of PyTorch, in an environment that has another one
# make test-long             slow proofs: long random rounds, soak
# make test-gpu              the tests that need CUDA devices, with GPU_PYTHON=... (default python3), which need not be .venv
# make lock                  renew requirements-dev.lock, the newest versions of all that is installed, and constraints/
# make release VERSION=...   check, build, commit and tag a release; pushes nothing
# make bench                 our code next to the baselines: JSON lines, then a table
PYTHON ?= python3
GPU_PYTHON ?= python3
BIN := .venv/bin
# Each target installs its tools into .venv when it is first made, and when their versions change.
INSTALLED := .venv/installed
# tests/conftest.py says how many processes; the tests of a file stay together, because they share fixtures.
PYTEST := $(BIN)/pytest --numprocesses auto --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast test-examples test-torch test-long test-gpu check check-imports fix package docs docs-serve coverage lock \
	release bench
help:
	@sed -n 's/^# make /make /p' Makefile

install: $(INSTALLED)-demo
$(INSTALLED)-%: pyproject.toml requirements-dev.lock scripts/install.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "evenrank needs Python 3.11 or newer: \
	make install PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python scripts/install.py $*
	@touch $@

demo: $(INSTALLED)-demo
	@$(BIN)/python scripts/demo.py

test: $(INSTALLED)-test
	@$(PYTEST)

test-fast: $(INSTALLED)-test
	@$(PYTEST) -m 'not processes and not long and not examples'

test-examples: $(INSTALLED)-test
	@$(PYTEST) -m examples tests/examples

test-torch: $(INSTALLED)-test
	@$(PYTEST) tests/core tests/datasets tests/codebooks tests/dataloader tests/training tests/examples/trainer/test_pipelines.py

test-long: $(INSTALLED)-test
	@$(BIN)/pytest -m long --timeout 3600

test-gpu:
	@$(GPU_PYTHON) -P -m pytest -m "gpu or multi_gpu" -rs -W default tests/datasets tests/checkpoints tests/dataloader tests/training tests/examples tests/scripts tests/soak

check: $(INSTALLED)-check
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/mypy tests scripts examples

check-imports: $(INSTALLED)-check
	@$(BIN)/pyright

fix: $(INSTALLED)-check
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

package: $(INSTALLED)-package
	@$(BIN)/python scripts/check_package.py

coverage: $(INSTALLED)-test
	@$(PYTEST) --cov --cov-report=term:skip-covered

lock: $(INSTALLED)-package
	@$(BIN)/python scripts/lock.py

release: $(INSTALLED)-package
	@$(BIN)/python scripts/release.py "$(VERSION)"

# Needs no PyTorch: the reference is read from the sources, and from `evenrank --help`, which the pages run.
MKDOCS := PATH="$(CURDIR)/$(BIN):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
docs: $(INSTALLED)-docs
	@$(MKDOCS) build --strict
	@$(BIN)/python scripts/check_site.py site

docs-serve: $(INSTALLED)-docs
	@$(MKDOCS) serve

bench: $(INSTALLED)-test
	@$(BIN)/python scripts/bench/planner.py
	@$(BIN)/python scripts/bench/loader.py
	@$(BIN)/python scripts/bench/pools.py
	@$(BIN)/python scripts/bench/preprocess.py
