# The two commands of the README are `make demo` and `make test`. Needs Python >= 3.11 and make.
# VENV=<folder> uses another virtual environment, ARGS=… goes to the program (make test ARGS=-x).

VENV ?= .venv
PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
NODE_MODULES := tests/sdk/node_modules/.installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_USER := 0
export PYTHONUTF8 := 1
export npm_config_update_notifier := false

.DEFAULT_GOAL := help
.PHONY: help demo test chaos bench bench-peers lint ruff format mypy imports clean

help:
	@echo "make demo   a live order board on embedded servers, in the browser"
	@echo "make test   the whole test suite, on embedded servers"
	@echo "make chaos  random faults for MINUTES (30), repeatable by SEED, with a report"
	@echo "make bench  what it costs, with a report; NAMES='fanout pipeline' for some of it, ARGS=--quick"
	@echo "make bench-peers  the same messages by NOTIFY, Redis Pub/Sub, socket.io, NATS, Centrifugo"
	@echo "make lint   ruff, mypy and the import rules"
	@echo "make clean  remove what these made, the demo's data included"

demo: $(INSTALLED)
	@$(PYTHON) -m examples.orderboard $(ARGS)

test: $(INSTALLED) $(if $(wildcard tests/sdk/package.json),$(NODE_MODULES))
	@$(PYTHON) -m pytest $(ARGS)

chaos: $(INSTALLED)
	@$(PYTHON) -m tests.chaos $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) $(ARGS)

# Needs a C compiler for the load client. The report goes to build/benchmarks/.
bench: $(INSTALLED)
	@$(PYTHON) -m benchmarks $(NAMES) $(ARGS)

# Also installs the peers: what is lacking for one (Node.js, Go) leaves it out.
bench-peers: $(INSTALLED)
	@$(PYTHON) -m benchmarks.peers
	@$(PYTHON) -m benchmarks peers --output build/benchmarks-peers $(ARGS)

lint: ruff format mypy imports

ruff: $(INSTALLED)
	$(PYTHON) -m ruff check .

format: $(INSTALLED)
	$(PYTHON) -m ruff format --check .

mypy: $(INSTALLED)
	$(PYTHON) -m mypy

imports: $(INSTALLED)
	$(VENV)/bin/lint-imports

clean:
	rm -rf .venv .tidegate tests/sdk/node_modules benchmarks/peers/node_modules build dist *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Newest first among the versions that the constraints were made for; the next name may be a newer
# one still. A name on PATH need not run (version switchers leave such), so each is tried.
$(INSTALLED): pyproject.toml constraints.txt
	@set -e; \
	if [ ! -x "$(PYTHON)" ]; then \
		for name in python3.13 python3.12 python3.11 python3 python none; do \
			if [ $$name = none ]; then \
				echo "Python 3.11 or newer is needed, and none was found on PATH" >&2; exit 1; \
			fi; \
			$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
			if $$name -c 'import ensurepip, venv' 2>/dev/null; then break; fi; \
			echo "$$name lacks the module venv (Debian: apt-get install python3-venv)" >&2; \
		done; \
		echo "making a virtual environment in $(VENV) with $$($$name --version)"; \
		$$name -m venv "$(VENV)"; \
	fi; \
	echo "installing (about a minute the first time) …"; \
	"$(PYTHON)" -m pip install --quiet --constraint constraints.txt setuptools; \
	"$(PYTHON)" -m pip install --quiet --constraint constraints.txt --no-build-isolation \
		--editable '.[dev]'; \
	touch "$@"

# Without Node.js, or without a network, the tests that need it are skipped and say so.
$(NODE_MODULES): $(wildcard tests/sdk/package.json tests/sdk/package-lock.json)
	@if ! command -v npm >/dev/null; then \
		echo "npm is not installed: the tests of the JavaScript SDK will be skipped"; \
	elif (cd tests/sdk && npm ci --no-audit --no-fund --loglevel=error); then \
		touch "$@"; \
	else \
		echo "npm ci failed: the tests of the JavaScript SDK will be skipped"; \
	fi
