# Everything a developer or CI runs. `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The interpreter that makes the virtual environments: Python 3.11 or newer with the venv module.
PYTHON ?= python3
# Where pip finds a CPU build of torch, if your index serves the CUDA build by default. Empty: pip's own.
TORCH_INDEX ?=
# Further words for pytest, e.g. PYTEST_ARGS='tests/unit -x'.
PYTEST_ARGS ?=
# Git revisions to compare the wire protocol with.
BREAKING_AGAINST ?= HEAD HEAD~1

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROTO_VENV := .venv-proto
PROTO_STAMP := $(PROTO_VENV)/.installed
PROTO_TOOLS := grpcio-tools==1.74.0
PROTO_FILES := $(wildcard proto/tandem/v1/*.proto)
# $(1) is the directory that receives the stubs.
PROTOC = $(PROTO_VENV)/bin/python -m grpc_tools.protoc -I proto \
	--python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) $(PROTO_FILES)

CHECK_PYTHON = $(PYTHON) -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "$(PYTHON) must be Python 3.11 or newer with venv; set PYTHON=..." >&2; exit 1; }

.PHONY: help
help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(STAMP) ## Make .venv with everything that the other targets need.

# Mooncake's wheel needs three system libraries. Without them only `--kv-engine mooncake` is missing.
MOONCAKE_LIBS := libibverbs1 libnuma1 libcurl4
HAS_MOONCAKE_LIBS = /sbin/ldconfig -p | grep -q 'libibverbs\.so\.1'

$(STAMP): pyproject.toml constraints.txt
	@$(CHECK_PYTHON)
	@$(HAS_MOONCAKE_LIBS) || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends $(MOONCAKE_LIBS) >/dev/null; } || \
		echo "note: install $(MOONCAKE_LIBS) to use --kv-engine mooncake"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt -e '.[dev]'
	@$(BIN)/python -c 'import torch; torch.version.cuda and print(f"note: torch {torch.__version__} is a CUDA build; the CPU build is enough (see TORCH_INDEX in README.md)")'
	@touch $@

.PHONY: demo
demo: setup ## Start a pair, ask it recall questions, and compare with a single process.
	$(BIN)/python -m tandem.demo

.PHONY: test
test: setup ## Run every test.
	$(BIN)/python -m pytest $(PYTEST_ARGS)

.PHONY: lint
lint: setup ## Check style and formatting.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: format
format: setup ## Apply the formatter and the safe fixes.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: types
types: setup ## Check types, strictly.
	$(BIN)/mypy

.PHONY: imports
imports: setup ## Check who imports whom.
	$(BIN)/lint-imports

.PHONY: proto
proto: $(PROTO_STAMP) ## Regenerate the stubs beside the .proto files.
	$(call PROTOC,proto)

$(PROTO_STAMP): Makefile
	@$(CHECK_PYTHON)
	test -x $(PROTO_VENV)/bin/python || $(PYTHON) -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/python -m pip install --disable-pip-version-check --quiet '$(PROTO_TOOLS)' 'setuptools<81'
	@touch $@

.PHONY: proto-check
proto-check: setup $(PROTO_STAMP) breaking ## Check that stubs are fresh, and lint the protocol.
	$(BIN)/buf lint proto
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	$(call PROTOC,"$$fresh"); \
	diff -ru --exclude='*.proto' --exclude=__pycache__ --exclude=buf.yaml "$$fresh/tandem" proto/tandem || \
		{ echo "the stubs are stale: run 'make proto' and commit the result" >&2; exit 1; }; \
	echo "proto: stubs are fresh"

.PHONY: breaking
breaking: setup ## Check that the wire protocol still understands its predecessors.
	@for revision in $(BREAKING_AGAINST); do \
		if ! git cat-file -e "$$revision:proto/tandem" 2>/dev/null; then \
			echo "breaking: $$revision has no proto/tandem; skipped"; continue; \
		fi; \
		before=$$(mktemp -d); trap 'rm -rf "$$before"' EXIT; \
		git archive "$$revision" proto | tar -x -C "$$before"; \
		$(BIN)/buf breaking proto --against "$$before/proto"; \
		rm -rf "$$before"; \
		echo "breaking: compatible with $$revision"; \
	done

.PHONY: docs
docs: setup ## Regenerate the parts of docs/ that are made from code.
	$(BIN)/python -c 'from serving_core.config import render_reference; print(render_reference(), end="")' \
		> docs/configuration.md

.PHONY: bench
bench: setup ## Measure a local pair and print the figures.
	$(BIN)/python -m bench.pair $(BENCH_ARGS)

.PHONY: bench-transfer
bench-transfer: setup ## Measure how fast the engines move blocks, and save the figures.
	$(BIN)/python -m bench.transfer --save $(BENCH_ARGS)

.PHONY: bench-router
bench-router: setup ## Measure the router and the servicer, and save the figures.
	$(BIN)/python -m bench.router --save $(BENCH_ARGS)

.PHONY: clean
clean: ## Remove the environments and caches.
	rm -rf $(VENV) $(PROTO_VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
