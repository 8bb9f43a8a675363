# Every target works on a machine with only python3, make and a package manager.
# `setup` is implied. It does nothing while the lock, pyproject.toml and tools/setup.py are older than the stamp.

.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

STAMP  := .venv/.setup-done
PYTHON := .venv/bin/python
# The first Python found only starts tools/setup.py, which looks for a Python that is new enough.
SETUP = starter=$$(command -v python3 || command -v python3.13 || command -v python3.12 || command -v python3.11) \
	|| { echo 'setup: Please install Python 3.11 or newer, none was found on the PATH.' >&2; exit 1; }; \
	"$$starter" tools/setup.py

SOURCES = $(wildcard src tests bench tools examples)

.PHONY: help setup demo test quick check format bench bench-files bench-tasks bench-audit bench-mail bench-peers bench-brokers bench-engine bench-coordinator bench-goals bench-up bench-pipeline crash simulate fuzz coverage structure docs screenshots lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1|\2/' \
		| while IFS='|' read -r name text; do printf 'make %-12s %s\n' "$$name" "$$text"; done

$(STAMP): requirements.lock pyproject.toml tools/setup.py
	@$(SETUP)

setup: $(STAMP) ## make .venv with the locked tools and postroom (implied by the others)
	@:

# Spark needs Java, tests open the report and the live page in a real browser, and a bench runs Celery on two brokers.
JAVA    := java=default-jre-headless
BROWSER := chromium
BROKERS := redis-server rabbitmq-server epmd=erlang-base
SANDBOX := bwrap=bubblewrap
BOUNCER := pgbouncer

demo: $(STAMP) ## a tour with real processes, some of which are killed
	@$(PYTHON) tools/setup.py --system $(JAVA)
	@$(PYTHON) examples/demo.py

test: $(STAMP) ## all tests, with the time of each part
	@$(PYTHON) tools/setup.py --system $(JAVA) $(BROWSER) $(BROKERS) $(SANDBOX) $(BOUNCER)
	@$(PYTHON) tools/run_tests.py

quick: $(STAMP) ## unit and contract tests, in about 2 minutes on two idle cores
	@$(PYTHON) tools/setup.py --system $(BROKERS) $(SANDBOX)
	@$(PYTHON) tools/run_tests.py quick

check: $(STAMP) ## lint, formatting, registry hosts, types, import layers
	@$(PYTHON) -m ruff check
	@$(PYTHON) -m ruff format --check
	@$(PYTHON) tools/check_hosts.py
	@$(PYTHON) -m mypy $(SOURCES)
	@.venv/bin/lint-imports --no-logo

format: $(STAMP) ## format the sources
	@$(PYTHON) -m ruff check --fix-only --quiet
	@$(PYTHON) -m ruff format

bench: $(STAMP) ## every benchmark
	@$(PYTHON) tools/setup.py --system $(JAVA) $(BROWSER) $(BROKERS)
	@failed=0; for script in bench/bench_*.py; do $(PYTHON) "$$script" || failed=1; done; exit $$failed

bench-files: $(STAMP) ## the benchmark of Bus and Queue against bare system calls
	@$(PYTHON) bench/bench_files.py

bench-tasks: $(STAMP) ## the benchmark of Tasks against huey, litequeue and persist-queue
	@$(PYTHON) bench/bench_tasks.py

bench-audit: $(STAMP) ## the benchmark of the audit stream, with a history of 5 million events
	@$(PYTHON) bench/bench_audit.py

bench-mail: $(STAMP) ## the benchmark of Mail against nats-server
	@$(PYTHON) bench/bench_mail.py

bench-peers: $(STAMP) ## the benchmark of Tasks against Celery on Redis and RabbitMQ
	@$(PYTHON) tools/setup.py --system $(BROKERS)
	@$(PYTHON) bench/bench_peers.py

bench-brokers: $(STAMP) ## the benchmark of PostgreSQL and RabbitMQ against raw clients and other queues
	@$(PYTHON) tools/setup.py --system $(BROKERS)
	@$(PYTHON) bench/bench_brokers.py

bench-engine: $(STAMP) ## the benchmark of Engine against Celery, dramatiq and DBOS
	@$(PYTHON) tools/setup.py --system $(BROKERS)
	@$(PYTHON) bench/bench_engine.py

bench-goals: $(STAMP) ## the benchmark of goals, graph, conflicts and sandboxes
	@$(PYTHON) bench/bench_goals.py

bench-coordinator: $(STAMP) ## the benchmark of Coordinator: requests, streams, idle agents
	@$(PYTHON) bench/bench_coordinator.py

bench-up: $(STAMP) ## the benchmark of up: start, memory, MCP over stdio, submits over HTTP, the live page
	@$(PYTHON) tools/setup.py --system $(BROWSER)
	@$(PYTHON) bench/bench_up.py

bench-pipeline: $(STAMP) ## the benchmark of the pipeline on Spark against DuckDB and Polars (long)
	@$(PYTHON) tools/setup.py --system $(JAVA)
	@$(PYTHON) bench/bench_pipeline.py

crash: $(STAMP) ## kills, stops, flipped bits, failing system calls, power cuts, full disks, soak (long)
	@$(PYTHON) tools/setup.py --system $(JAVA) $(BROKERS) $(BOUNCER) strace mkfs.ext4=e2fsprogs
	@$(PYTHON) -m tests.crash.run

simulate: $(STAMP) ## 100,000 seeded histories of an engine, on all cores (long)
	@$(PYTHON) tools/simulate.py

fuzz: $(STAMP) ## a million inputs for each parser (long)
	@$(PYTHON) -m tests.fuzz.run

coverage: $(STAMP) ## branch coverage of the tests, child processes included
	@$(PYTHON) tools/coverage_gate.py

structure: $(STAMP) ## figures about the structure of src: files, functions, circles, classes
	@$(PYTHON) tools/measure_structure.py

docs: $(STAMP) ## write the generated pages: docs/reference, the statements of the engine, parts of docs/architecture.md
	@$(PYTHON) tools/gen_reference.py

screenshots: $(STAMP) ## pictures of each view of the live page, in docs/page
	@$(PYTHON) tools/setup.py --system $(BROWSER)
	@$(PYTHON) tools/screenshots.py

lock: ## write requirements.lock (needs the network)
	@$(SETUP) --lock
	@$(MAKE) setup

clean: ## remove everything that the other targets made
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.* build dist
	@find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
