# One verb each. `make` lists them. Everything runs in .venv, which `make setup` creates.

VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
LISTEN ?= 127.0.0.1:50051

# The first Python that is new enough; give PYTHON= to choose another.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.DEFAULT_GOAL := help
.PHONY: help setup proto fmt lint test run stop ci soak fidelity bench load clean

help: ## List the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## Create .venv with everything pinned, kernels built

# Installing builds the kernels, so their sources count too.
$(STAMP): pyproject.toml constraints.txt kernels/build.py $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed (PYTHON=...)" >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

proto: setup ## Generate service/pb from the proto
	$(PY) protos/stubs.py

fmt: setup ## Format, and fix what can be fixed
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

lint: setup ## Style, types, architecture, wire
	$(PY) -m ruff check --no-cache .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports
	$(PY) protos/stubs.py --check

test: setup ## The default test suite
	$(PY) -m pytest $(PYTEST_ARGS)

run: setup ## Start a server and stream a completion (ONESHOT=1 stops it afterwards)
	@$(PY) -m service.cli.quickstart --listen $(LISTEN) $(if $(ONESHOT),--oneshot)

stop: setup ## Stop the server that `make run` left
	@$(PY) -m service.cli.quickstart --stop

ci: lint test ## What CI runs

soak: setup ## The long tests (load, crashes, leaks) and those that download models
	$(PY) -m pytest -m 'slow or model' --timeout 3600 $(PYTEST_ARGS)

fidelity: setup ## Output of a real model against the reference (FIDELITY_ARGS)
	$(PY) -m tests.fidelity $(FIDELITY_ARGS)

bench: setup ## All measurements of its own, in ten minutes (BENCH_ARGS='--only memory')
	$(PY) -m tests.bench $(BENCH_ARGS)

load: setup ## Load on the running server (LOAD_ARGS='--concurrency 32')
	$(PY) -m loadtest --target $(LISTEN) $(LOAD_ARGS)

clean: ## Remove what can be made again
	rm -rf $(VENV) .run build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache \
	    .import_linter_cache .hypothesis kernels/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
