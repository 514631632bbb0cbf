# Fulcrum's commands. Everything is installed into .venv beside this file; `make help` lists the targets.
PYTHON ?= python3
MODEL ?=
PORT ?= 8000
GRPC_PORT ?= 50051
SERVE_ARGS ?=
TEST_WORKERS ?= 2
PYTEST_ARGS ?=
SOAK_SECONDS ?= 600
SOAK_SEED ?= 1
SOAK_REQUESTS ?= 100000
FUZZ_EXAMPLES ?= 500
FUZZ_SEED ?= 1

BIN := .venv/bin
# Bytecode is written when a module is first used: compiling all of torch takes longer than the rest.
# Twice quiet: errors alone, no warnings about the machine's own pip settings.
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check
export PIP_ROOT_USER_ACTION ?= ignore

.PHONY: help serve test test-full soak fuzz lint types audit format proto clean
.DELETE_ON_ERROR:

help: ## Lists the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

serve: .venv/serve.stamp ## Engine and gateway on this machine: MODEL=... PORT=8000 GRPC_PORT=50051 SERVE_ARGS="--dtype float32"
	@exec $(BIN)/fulcrum serve --port $(PORT) --grpc-port $(GRPC_PORT) $(SERVE_ARGS) $(if $(MODEL),"$(MODEL)")

test: .venv/dev.stamp ## The test suite (no GPU, no network)
	@$(BIN)/pytest -n $(TEST_WORKERS) --dist loadfile -m "not full and not gpu" $(PYTEST_ARGS)

test-full: .venv/dev.stamp ## The long forms too, and the GPU's tests where there is one
	@$(BIN)/pytest $(PYTEST_ARGS)

soak: .venv/dev.stamp ## Random crowds on a tiny model, and 100,000 requests: SOAK_SECONDS=600 SOAK_SEED=1 SOAK_REQUESTS=100000
	@SOAK_SECONDS=$(SOAK_SECONDS) SOAK_SEED=$(SOAK_SEED) SOAK_REQUESTS=$(SOAK_REQUESTS) \
		$(BIN)/pytest --log-cli-level=INFO --log-disable=httpx tests/e2e/test_soak.py tests/engine/test_leaks.py

fuzz: .venv/dev.stamp ## Whatever can be sent, over HTTP and gRPC: FUZZ_EXAMPLES=500 FUZZ_SEED=1
	@FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) FUZZ_SEED=$(FUZZ_SEED) $(BIN)/pytest --timeout 7200 tests/e2e/test_fuzz.py

lint: .venv/dev.stamp ## Formatting, style, the contract's style, and who may import whom
	@$(BIN)/ruff format --check . || { echo "Run 'make format'." >&2; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/buf lint
	@$(BIN)/lint-imports --no-logo

types: .venv/dev.stamp ## mypy, strict
	@$(BIN)/mypy

audit: .venv/dev.stamp ## Looks for known vulnerabilities of what .venv holds (asks the Internet, so it is not part of CI)
	@$(PIP) install --no-compile pip-audit
	@$(BIN)/pip-audit --local --skip-editable

format: .venv/dev.stamp ## Formats the code and mends what ruff can mend
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .

proto: .venv/dev.stamp ## Generates the stubs from inference.proto anew
	@$(BIN)/python -m grpc_tools.protoc --proto_path=proto --python_out=proto --pyi_out=proto --grpc_python_out=proto \
		proto/fulcrum/v1/inference.proto

clean: ## Removes .venv and the tools' caches
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

.venv/pip.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Fulcrum needs Python 3.11 or newer, and '$(PYTHON)' is not: say make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv .venv || { echo "Could not make .venv (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@touch $@

.venv/serve.stamp: .venv/pip.stamp pyproject.toml constraints.txt
	@echo "Installing Fulcrum into .venv (the first time this takes some minutes, most of them for torch)" >&2
	@$(PIP) install --no-compile -c constraints.txt -e '.[engine,gateway]'
	@touch $@

# After serve.stamp, so that two pips never work on one environment, not even under make -j.
.venv/dev.stamp: .venv/serve.stamp
	@echo "Installing the developer's tools into .venv" >&2
	@$(PIP) install --no-compile -c constraints.txt -e '.[engine,gateway,dev]'
	@touch $@
