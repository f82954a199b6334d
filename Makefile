# `make` without a target lists the targets.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.PHONY: help setup demo test test-full lint types mypy pyright unit torture check smoke brokers-up brokers-down pipeline bench bench-brokers bench-spark bench-check docs requirements clean

BIN := .venv/bin
STAMP := .venv/.ready
RUN_STAMP := .venv/.run-ready

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv with the pinned requirements and qkit itself

$(STAMP): requirements/dev.txt pyproject.toml scripts/make-venv
	scripts/make-venv dev
	@touch $(RUN_STAMP) $@

# Installs only what `make demo` needs, which takes a few seconds; `setup` installs everything.
$(RUN_STAMP): requirements/run.txt pyproject.toml scripts/make-venv
	scripts/make-venv run
	@touch $@

demo: $(RUN_STAMP) ## Run examples/orders.py on the native engine; QKIT_TYPE=rabbitmq selects a broker, DEMO_SERVE=1 keeps it running
	@PYTHON=$(BIN)/python scripts/demo

test: setup ## Run lint, type checks and tests against real brokers; COVERAGE=1 also measures coverage and takes twice as long
	$(MAKE) --no-print-directory -j2 --output-sync=target lint types
	@PYTHONPATH=scripts $(BIN)/python -m local_brokers.chromium
	scripts/brokers run $(MAKE) --no-print-directory check

test-full: setup ## Run the tests marked full: longer versions of tests in `make test`, or the same tests on every broker
	scripts/brokers run $(BIN)/python -m pytest -m "full and not torture" $(PARALLEL) --timeout 900

# Spark is left out: it has its own tests, and its packages take minutes to install.
SMOKE_EXTRAS := cli kafka rabbitmq redis web
SMOKE_VENV := build/lowest
smoke: setup ## Use qkit on every backend with the lowest versions of its dependencies
	rm -rf $(SMOKE_VENV)
	$(BIN)/python -m venv $(SMOKE_VENV)
	$(BIN)/python scripts/lowest-versions $(SMOKE_EXTRAS) > $(SMOKE_VENV)/constraints.txt
	$(SMOKE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint $(SMOKE_VENV)/constraints.txt '.[$(shell echo $(SMOKE_EXTRAS) | tr " " ,)]'
	scripts/brokers run timeout 120 $(SMOKE_VENV)/bin/python scripts/smoke

# Tests mostly wait for brokers, so there can be more processes than cores.
# tests/support/scheduling.py decides which tests share a process.
JOBS ?= 6
PARALLEL = -n $(JOBS) --dist loadscope

# Tracing every line doubles the CPU time, so coverage is measured only on request, as in CI.
# `coverage run` starts before pytest's plugins, so it also measures imports; pytest-cov does not.
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

lint: setup ## Check rules and formatting with ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: mypy pyright ## Run mypy (strict) and pyright, and check that every public type is known

mypy: setup
	$(BIN)/mypy

pyright: setup
	$(BIN)/pyright
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pyright --verifytypes qkit --ignoreexternal  # pyright uses the first Python on PATH

unit: setup ## Run the tests that need neither a broker nor Spark
	$(BIN)/python -m pytest -m "not broker and not spark and not torture and not full"

torture: setup ## Run the long versions of the reliability tests
	scripts/brokers run $(BIN)/python -m pytest -m torture --timeout 3600

brokers-up: ## Start Redis, RabbitMQ and Kafka and print their URLs
	@scripts/brokers up
	@scripts/brokers urls

brokers-down: ## Stop the brokers and remove their data
	@scripts/brokers down

BENCH_STAMP := .venv/.bench-ready

$(BENCH_STAMP): $(STAMP) requirements/bench.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements/bench.txt
	@touch $@

pipeline: setup ## Run the Spark pipeline with 1,000,000 events, or with OPTIONS="--count 10000"
	@$(BIN)/python spark/pipeline.py --report build/pipeline.html $(OPTIONS)

bench: $(BENCH_STAMP) ## Run the benchmarks of the native engine; OPTIONS="--only durable" selects some
	@$(BIN)/python -m benchmarks.native $(OPTIONS)

bench-brokers: $(BENCH_STAMP) ## Run the benchmarks on RabbitMQ, Kafka and Redis; OPTIONS="--only redis" selects some
	@scripts/brokers run $(BIN)/python -m benchmarks.brokers $(OPTIONS)

bench-spark: $(BENCH_STAMP) ## Run the Spark benchmarks; OPTIONS="--only kafka" selects some
	@scripts/brokers run $(BIN)/python -m benchmarks.spark $(OPTIONS)

bench-check: $(BENCH_STAMP) ## Run all benchmarks and fail if a target is missed without a waiver
	@$(BIN)/python -m benchmarks.native --check $(OPTIONS)
	@scripts/brokers run $(BIN)/python -m benchmarks.brokers --check $(OPTIONS)
	@scripts/brokers run $(BIN)/python -m benchmarks.spark --check $(OPTIONS)

docs: setup ## Run every example in the docs and docstrings; check links and requirements
	$(BIN)/python -m pytest src tests/test_docs.py tests/test_requirements.py tests/examples

requirements: setup ## Compile requirements/*.txt from requirements/*.in
	for name in run dev bench; do \
		CUSTOM_COMPILE_COMMAND="make requirements" $(BIN)/pip-compile --quiet --upgrade --generate-hashes \
			--allow-unsafe --strip-extras --no-emit-index-url --no-emit-trusted-host --no-emit-find-links \
			--output-file requirements/$$name.txt requirements/$$name.in; \
	done

clean: ## Remove .venv, brokers, caches and build output
	scripts/brokers down
	rm -rf .venv .brokers .mypy_cache .pytest_cache .ruff_cache .hypothesis dist build htmlcov .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
