# `make serve` and `make test` work on a fresh machine: each installs what it needs first.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEVICE ?= cpu# cpu or gpu: which build of torch and vLLM to install
CONFIG ?= serve_config.yaml# what `make serve` serves; `arbiter init` writes one for a machine
SEEDS ?= 10000
KILLS ?= 200
MINUTES ?= 6

# Set before Ray starts; none is needed for correctness, a plain `serve run` works without them.
#   RAY_preload_python_modules: a replica's process has Serve imported when it starts (wake -0.3 s)
#   RAY_worker_maximum_startup_concurrency: idle workers are prestarted, so several wakes at once do not queue
#   RAY_SERVE_USE_GRPC_BY_DEFAULT: proxy, front and replicas stream to each other by gRPC, not as one
#     object of Ray for each piece: half the processor time of a token outside its engine. The port
#     for it is open in every replica of Serve either way
#   RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH: of that, in bytes; Serve's 4 MB is less than a body may have
#   RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD, RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP: fronts and
#     replicas compute nothing, so they need no thread beside Serve's, and no hop to it with each piece
#   RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH: the proxy answers 503 with Retry-After where the front
#     died under a request, which is a bare 500 otherwise
#   RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO: replicas reserve no GPU with Ray; the arbiter chooses for them
#   HF_HUB_OFFLINE: models are local; an engine never waits for a hub that cannot be reached
#   RAY_USAGE_STATS_ENABLED: no report to outside
export RAY_preload_python_modules ?= deployments.worker_start
export RAY_worker_maximum_startup_concurrency ?= 8
export RAY_SERVE_USE_GRPC_BY_DEFAULT ?= 1
export RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH ?= 268435456
export RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD ?= 0
export RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP ?= 0
export RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH ?= deployments.front.proxy:middlewares
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO ?= 0
export HF_HUB_OFFLINE ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: vendor serve test retest check bench sim chaos graph-chaos soak models install
.DEFAULT_GOAL := serve

install: $(VENV)/.installed-$(DEVICE)

$(VENV)/.installed-$(DEVICE): pyproject.toml constraints-$(DEVICE).txt constraints-weights.txt
	@$(PYTHON) tools/install.py --venv $(VENV) --device $(DEVICE)
	@touch $@

models: install
	@$(BIN)/python -m models.make_models $(if $(RETRAIN),--retrain)

# Ray's own lines go to a file, which is named at the end; VERBOSE=1 shows them.
serve: install models
	@$(BIN)/arbiter serve $(CONFIG)

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
# What is imported is declared: by the product without the dev extra, by the rest with it.
	$(BIN)/deptry . --extend-exclude benchmarks --extend-exclude notebooks \
		--optional-dependencies-dev-groups dev
	$(BIN)/deptry . --exclude '\.venv' --ignore DEP002
	$(BIN)/pytest tests/style

FAST := tests/unit tests/model tests/sim tests/style

# On both cores what neither starts Ray nor an engine; the rest mostly waits for processes to start,
# and a test of it that takes long is named meanwhile.
test: install models
	@failed=; $(BIN)/pytest -n 2 $(FAST) || failed=1; \
		$(BIN)/pytest -p tests.support.heartbeat tests $(FAST:%=--ignore=%) || failed=1; \
		test -z "$$failed"

retest: install models
	$(BIN)/pytest --last-failed --last-failed-no-failures none

sim: install
	SIM_SEEDS=$(SEEDS) $(BIN)/pytest tests/sim

bench: install models
	$(BIN)/python -m benchmarks.run

chaos: install
	$(BIN)/python -m benchmarks.chaos --kills $(KILLS)

# The same against everything that `make serve` starts, Serve's own processes included.
graph-chaos: install models
	$(BIN)/python -m benchmarks.graph_chaos --kills $(KILLS)

# The libraries that the console carries, from the tarballs that npm has (node's npm is needed).
vendor: install
	$(BIN)/python tools/vendor.py $(if $(ACCEPT),--accept)

soak: install models
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES)
