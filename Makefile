# `make` alone prints what there is.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.PHONY: help setup demo test test-full lint types unit torture check brokers-up brokers-down pipeline bench bench-brokers bench-spark bench-check docs requirements clean

BIN := .venv/bin
STAMP := .venv/.ready
RUN_STAMP := .venv/.run-ready

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Prepare .venv: pinned requirements and qkit itself

$(STAMP): requirements/dev.txt pyproject.toml scripts/make-venv
	scripts/make-venv dev
	@touch $(RUN_STAMP) $@

# Enough to run it, in a few seconds; `setup` brings the rest.
$(RUN_STAMP): requirements/run.txt pyproject.toml scripts/make-venv
	scripts/make-venv run
	@touch $@

demo: $(RUN_STAMP) ## Run examples/orders.py on the native engine, or QKIT_TYPE=rabbitmq; DEMO_SERVE=1 keeps it open
	@PYTHON=$(BIN)/python scripts/demo

test: setup ## Lint, types and the tests against real brokers; COVERAGE=1 measures coverage, in twice the time
	$(MAKE) --no-print-directory lint types
	@PYTHONPATH=scripts $(BIN)/python -m local_brokers.chromium
	scripts/brokers run $(MAKE) --no-print-directory check

test-full: setup ## What repeats a proof of `make test` at length or on every broker; CI runs both
	scripts/brokers run $(BIN)/python -m pytest -m full $(PARALLEL) --timeout 900

# Most of the time goes in waiting for brokers, so several tests run side by side, more than there
# are cores. tests/support/scheduling.py says which tests share a process.
JOBS ?= 4
PARALLEL = -n $(JOBS) --dist loadscope

# Tracing every line doubles the CPU time, so coverage is measured only on request: CI does.
# `coverage run` and not pytest-cov: it measures imports that pytest makes before plugins start.
COVERAGE ?=
check: setup
ifeq ($(COVERAGE),)
	$(BIN)/python -m pytest $(PARALLEL)
else
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(PARALLEL)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report
endif

lint: setup ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## mypy (strict) and pyright
	$(BIN)/mypy
	$(BIN)/pyright

unit: setup ## The tests that need neither a broker nor Spark
	$(BIN)/python -m pytest -m "not broker and not spark and not torture and not full"

torture: setup ## The long versions of the reliability tests
	scripts/brokers run $(BIN)/python -m pytest -m torture --timeout 3600

brokers-up: ## Start Redis, RabbitMQ and Kafka and print their addresses
	@scripts/brokers up
	@scripts/brokers urls

brokers-down: ## Stop them and remove their data
	@scripts/brokers down

BENCH_STAMP := .venv/.bench-ready

$(BENCH_STAMP): $(STAMP) requirements/bench.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements/bench.txt
	@touch $@

pipeline: setup ## Generate, publish, handle, archive and report 1,000,000 events; OPTIONS="--count 10000"
	@$(BIN)/python spark/pipeline.py --report build/pipeline.html $(OPTIONS)

bench: $(BENCH_STAMP) ## Run the native engine's benchmarks; OPTIONS="--only durable"
	@$(BIN)/python -m benchmarks.native $(OPTIONS)

bench-brokers: $(BENCH_STAMP) ## Run those on RabbitMQ, Kafka and Redis; OPTIONS="--only redis"
	@scripts/brokers run $(BIN)/python -m benchmarks.brokers $(OPTIONS)

bench-spark: $(BENCH_STAMP) ## Run those of Spark; OPTIONS="--only kafka"
	@scripts/brokers run $(BIN)/python -m benchmarks.spark $(OPTIONS)

bench-check: $(BENCH_STAMP) ## All of them, and fail if a bar is missed without a waiver
	@$(BIN)/python -m benchmarks.native --check $(OPTIONS)
	@scripts/brokers run $(BIN)/python -m benchmarks.brokers --check $(OPTIONS)
	@scripts/brokers run $(BIN)/python -m benchmarks.spark --check $(OPTIONS)

docs: setup ## Run every example in the docs and docstrings, check links and requirements
	$(BIN)/python -m pytest src tests/test_docs.py tests/test_requirements.py tests/examples

requirements: setup ## Compile requirements/*.txt anew from *.in
	for name in run dev bench; do \
		CUSTOM_COMPILE_COMMAND="make requirements" $(BIN)/pip-compile --quiet --upgrade --generate-hashes \
			--allow-unsafe --strip-extras --no-emit-index-url --no-emit-trusted-host --no-emit-find-links \
			--output-file requirements/$$name.txt requirements/$$name.in; \
	done

clean: ## Remove .venv, brokers, caches and build output
	scripts/brokers down
	rm -rf .venv .brokers .mypy_cache .pytest_cache .ruff_cache .hypothesis dist build htmlcov .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
