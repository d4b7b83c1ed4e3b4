# make run | make test | make test-nightly | make test-postgres | make test-ray | make test-stress | make clients | make soak | make chaos-nightly | make setup | make lint | make fields | make shots | make lock | make dist | make penny | make gpu-check | make gpu-bench | make auth-conformance | make mcp-conformance | make auth-coverage
# Python >= 3.11 and make are all that must be there. PYTHON, VENV and ARGS may be set on the command line.
SHELL := /bin/sh
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PYTEST_ARGS ?=
# Many tests wait for a process: three workers keep two cores busy.
TESTERS ?= 3
# Those by which every branch of gateway/auth runs: the tracer, which doubles what a test takes, sees no others.
AUTH := tests/gateway/auth tests/gateway/audit/test_by_itself.py \
  $(addprefix tests/gateway/routes/,asgi/test_cors.py shared/test_guards.py)
# Those that read the program instead of running it: its syntax trees are in one process, once.
SHAPE := $(addprefix tests/,test_tidy.py test_structure.py test_architecture.py docs/test_quotations.py)
SUITE := OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(TESTERS)
AUTH_COVERAGE := --cov=gateway/auth --cov-branch --cov-report=term-missing:skip-covered --cov-fail-under=100
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
export PIP_NO_INPUT := 1
# Where it is set, each process that the tests start compiles all it imports, and pytest rewrites all tests again.
export PYTHONDONTWRITEBYTECODE :=

CONFORMANCE := @modelcontextprotocol/conformance@0.2.0-alpha.12 @modelcontextprotocol/sdk@1 \
  @modelcontextprotocol/inspector@2 @modelcontextprotocol/server-everything@2026.8.31 oauth4webapi@3 oidc-provider@9 \
  playwright-core@1
KIT = npm install --prefix .conformance --no-audit --no-fund $(CONFORMANCE) \
  "node-$$(uname -s | tr A-Z a-z)-$$(uname -m | sed 's/x86_64/x64/; s/aarch64/arm64/')@24"

# Programs of others before a live server: lm-eval, sentence-transformers, openai-agents, langchain-openai, litellm; in an
# environment of their own, and coding agents from npm.
CODING_AGENTS := @anthropic-ai/claude-code@2.1.332 @openai/codex@0.169.0
clients: $(VENV)/.dev .clients/.done
	npm install --prefix .clients/agents --no-audit --no-fund --ignore-scripts --loglevel=error $(CODING_AGENTS)
	CLIENTS_PYTHON=$(CURDIR)/.clients/bin/python $(BIN)/python -m tests.clients $(ARGS)

.clients/.done: requirements/clients.txt requirements/torch.txt
	@$(PYTHON) requirements/install.py .clients --torch
	.clients/bin/python -m pip install -q -r requirements/clients.txt
	@touch $@

.PHONY: tests bytecode test-nightly test-postgres test-ray test-stress clients fields map shots fuzz soak chaos-nightly run test setup lint lint-style lint-types lint-shape lock dist penny clean gpu-check gpu-bench auth-conformance mcp-conformance auth-coverage

run: $(VENV)/.runtime
	@exec $(BIN)/tollgate up $(ARGS)

# Everything but what is marked `nightly`, with small budgets (tests/budget.py); each worker has a Postgres and a Redis.
# Types are checked beside the tests, which wait for processes: what mypy says comes last.
test: $(VENV)/.dev lint-style
ifeq ($(strip $(PYTEST_ARGS)),)
	@said=$$(mktemp); $(BIN)/mypy >$$said 2>&1 & types=$$!; \
	  $(MAKE) --no-print-directory -j2 lint-shape bytecode && $(MAKE) --no-print-directory tests; status=$$?; \
	  wait $$types || status=1; cat $$said; rm $$said; exit $$status
else
	@$(MAKE) --no-print-directory -j2 lint-types lint-shape
	$(BIN)/python -m pytest $(PYTEST_ARGS)
endif

# In a clean clone, read all tests once beside the linters: each worker would rewrite and compile every one of them.
bytecode: $(VENV)/.dev
	@[ -d tests/gateway/__pycache__ ] || $(BIN)/python -m pytest -q --collect-only >/dev/null 2>&1 || true

# Without the checks of `make lint`.
tests: $(VENV)/.dev
	$(SUITE) $(addprefix --ignore=,$(SHAPE))

# All of it: large budgets, full products, every branch of gateway/auth, the oldest Postgres, Ray, a thousand kills, made-up
# conversations, the suites of others (which need npm), a soak.
test-nightly: $(VENV)/.dev lint
	SUITE_BUDGET=nightly $(MAKE) tests auth-coverage
	$(MAKE) test-postgres test-ray
	$(MAKE) chaos-nightly fuzz auth-conformance mcp-conformance soak

# What speaks SQL, on the oldest Postgres that is supported.
test-postgres: $(VENV)/.dev
	SUITE_POSTGRES=16 $(SUITE) tests/billing tests/upgrade tests/gateway/test_migrations.py tests/gateway/test_db.py \
	  $(addprefix tests/gateway/,audit batches limits mcp responses tenancy vault walls webhooks) \
	  --deselect tests/upgrade/test_previous_release.py $(PYTEST_ARGS)

# Engines on a Ray cluster of three nodes on this machine, one of which is killed. Ray is installed for it, if it can be had.
test-ray: $(VENV)/.dev
	$(PIP) install -q "$$($(BIN)/python -c 'import tomllib; \
	  print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["ray"])')" || true
	SUITE_RAY=1 $(BIN)/python -m pytest -rs -m ray tests/gateway/processes/launching $(PYTEST_ARGS)

# Three times in random order, with every core kept busy by something else; ARGS="4 5" for other orders.
test-stress: $(VENV)/.dev
	$(BIN)/python -m tests.stress $(ARGS)

# Twenty minutes at 80 % of what this machine does; ARGS="--minutes 2" for less. Nothing may grow or be left behind.
soak: $(VENV)/.dev
	$(BIN)/python -m bench.soak $(ARGS)

# What `tests/chaos/test_metering.py` does with a hundred kills, with a thousand; and the whole of tests/chaos with the spool's
# other sync policy.
chaos-nightly: $(VENV)/.dev
	$(BIN)/python -m tests.chaos.metering --kills 1000 $(ARGS)
	$(BIN)/python -m tests.chaos.metering --kills 1000 --sync before_answer $(ARGS)
	SUITE_SPOOL_SYNC=before_answer SUITE_BUDGET=nightly $(SUITE) tests/chaos

# What CI asks a few hundred times of every surface, with other conversations, and more of them.
fuzz: $(VENV)/.dev
	FUZZ_EXAMPLES=$(or $(EXAMPLES),1000) $(BIN)/python -m pytest -q -o timeout=0 \
	  tests/gateway/fuzz tests/journeys/test_every_surface.py $(ARGS)

# The tables of every field that a client can send, and of every option of an engine.
fields: $(VENV)/.dev
	$(BIN)/python -m gateway.wire.fields.table > docs/fields.md
	$(BIN)/python -m gateway.telemetry.page > docs/metrics.md
	$(BIN)/python deploy/grafana/dashboards.py
	$(BIN)/python -m tests.option_table

# The folder map of ARCHITECTURE.md, from the first sentence of each package.
map: $(VENV)/.dev
	$(BIN)/python -m tests.folder_map

# Pictures of each page of the console in shots/: light, dark, narrow, with little and much data; two go into docs/pictures/.
shots: $(VENV)/.dev
	SHOTS=$(or $(OUT),shots) $(BIN)/python -m pytest -q -k picture tests/gateway/console/test_shots.py \
	  tests/gateway/console/test_playground.py
	for each in $(or $(OUT),shots)/readme-*.png; do cp $$each docs/pictures/console-$${each##*/readme-}; done

setup: $(VENV)/.dev

# Types beside the rest: each takes one core.
lint: $(VENV)/.dev lint-style
	@$(MAKE) --no-print-directory -j2 lint-types lint-shape

lint-style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-types:
	$(BIN)/mypy

lint-shape:
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q $(SHAPE)

OLD_ENOUGH = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "tollgate needs Python >= 3.11; set PYTHON=/path/to/python3.11"; exit 1; }

$(BIN)/python:
	@$(OLD_ENOUGH)
	$(PYTHON) requirements/make_venv.py $(VENV)

# A line for each stage. The CPU build of PyTorch where there is no GPU; if it cannot be had, this stops and asks
# (ALLOW_CUDA=1 takes the build for CUDA, ALLOW_CUDA=0 the one for CPU on a machine with a GPU).
$(VENV)/.runtime: $(addprefix requirements/,runtime.lock torch.txt uv.txt install.py) pyproject.toml
	@$(OLD_ENOUGH)
	@$(PYTHON) requirements/install.py $(VENV)
	@touch $@

$(VENV)/.dev: requirements/dev.lock requirements/without_deps.txt $(VENV)/.runtime
	@$(BIN)/python requirements/install.py $(VENV) --dev
	@touch $@

# dist/tollgate-VERSION-py3-none-any.whl: engine, gateway, migrations, the model and the price books in one file. What an
# earlier build left would be in it.
dist: $(VENV)/.runtime
	rm -rf build *.egg-info
	$(BIN)/uv build -q --wheel --no-build-isolation --python $(BIN)/python --out-dir $(or $(OUT),dist) .
	rm -rf build *.egg-info

# The authorization server before clients (MCP's own among them, to a tool's result), a browser and an issuer of others. Node >= 22 comes as npm's package for this
# machine; the browser is the system's Chromium (apt-get install chromium), without which its tests are skipped.
auth-conformance: $(VENV)/.dev
	$(KIT)
	$(BIN)/python -m pytest -rs tests/conformance --ignore=tests/conformance/test_mcp_suite.py \
	  --ignore=tests/conformance/test_mcp_client_suite.py --ignore=tests/conformance/test_mcp_sdk_servers.py $(PYTEST_ARGS)

# The MCP bridge before the same suite, with servers of both eras behind it, our own and the SDK's (out of its sdist), and as
# the client of the suite's own servers; ROLE=server or ROLE=client for one of them.
MCP_SUITES := $(addprefix tests/conformance/test_mcp_,$(if $(filter client,$(ROLE)),,suite.py sdk_servers.py) \
  $(if $(filter server,$(ROLE)),,client_suite.py))
mcp-conformance: $(VENV)/.dev
	$(KIT)
	rm -rf .conformance/sdist .conformance/mcp-sdk && mkdir -p .conformance/mcp-sdk
	$(PIP) download -q --no-deps --no-binary mcp -d .conformance/sdist \
	  "mcp==$$($(BIN)/python -c 'from importlib.metadata import version; print(version("mcp"))')"
	tar xzf .conformance/sdist/mcp-*.tar.gz -C .conformance/mcp-sdk --strip-components=1
	$(BIN)/python -m pytest -rs $(MCP_SUITES) $(PYTEST_ARGS)

# Every branch of gateway/auth, by the tests that run it.
auth-coverage: $(VENV)/.dev
	SUITE_BUDGET=nightly $(SUITE) $(AUTH_COVERAGE) $(AUTH) $(PYTEST_ARGS)

# On a machine with a CUDA device. Nothing is installed: .venv where it is, else PYTHON with torch and triton (docs/gpu.md).
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

gpu-check:
	$(GPU_PYTHON) -m bench.gpu_check $(ARGS)

gpu-bench:
	$(GPU_PYTHON) -m bench.gpu_bench $(ARGS)

# Train penny from scratch and measure it: minutes on a GPU, a day on two cores. PENNY_MINUTES is the wall clock of the training.
PENNY_MINUTES ?= 10

penny:
	$(GPU_PYTHON) -m models.penny.train --minutes $(PENNY_MINUTES) $(ARGS)
	$(GPU_PYTHON) -m models.penny.evaluate --check --card
	cd models/penny && sha256sum model.safetensors tokenizer.json config.json

# Resolve anew; commit the result.
LOCKED := --universal --python-version 3.11 --generate-hashes --no-header --no-annotate
lock: $(BIN)/python
	$(PIP) install -q --require-hashes -r requirements/uv.txt
	$(PIP) install -q packaging
	$(BIN)/uv pip compile -q $(LOCKED) requirements/uv.txt -o requirements/uv.txt
	$(BIN)/uv pip compile -q $(LOCKED) --extra dev --extra s3 --extra otel-grpc \
	  pyproject.toml requirements/engine.in -o requirements/dev.lock
	$(BIN)/uv pip compile -q $(LOCKED) --extra s3 \
	  pyproject.toml requirements/engine.in -c requirements/dev.lock -o requirements/runtime.lock
	$(BIN)/python requirements/measure.py $(BIN)/uv

clean:
	rm -rf $(VENV) build dist *.egg-info
