# `make serve` and `make test` work on a fresh machine: each installs what it needs first.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEVICE ?= cpu# cpu or gpu: which build of torch and vLLM to install
CONFIG ?= serve_config.yaml# what `make serve` serves; `arbiter init` writes one for a machine
SEEDS ?= 10000
SHARE ?= 1
KILLS ?= 200
MINUTES ?= 6
CORES := $(shell getconf _NPROCESSORS_ONLN)

# What one process compiled is not compiled again by each of the hundreds that the tests start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: vendor serve test retest check types words imports declared style bench model sim chaos graph-chaos soak models install
.DEFAULT_GOAL := serve

install: $(VENV)/.installed-$(DEVICE)

$(VENV)/.installed-$(DEVICE): pyproject.toml constraints-$(DEVICE).txt constraints-weights.txt \
		constraints-weights-dev.txt
	@$(PYTHON) tools/install.py --venv $(VENV) --device $(DEVICE)
	@touch $@

models: install
	@$(BIN)/python -m models.make_models $(if $(RETRAIN),--retrain)

# Ray's own lines go to a file, which is named at the end; VERBOSE=1 shows them. What Ray and Serve
# read of the environment: deployments/config/start_variables.py.
serve: install models
	@$(BIN)/arbiter serve $(CONFIG)

# The five side by side on as many cores; what each prints stays together.
check: install
	@$(MAKE) --no-print-directory --keep-going --output-sync=target \
		-j$(CORES) types words imports declared style

types: install
	$(BIN)/mypy

words: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

imports: install
	$(BIN)/lint-imports

# What is imported is declared: by the product without the dev extra, by the rest with it.
declared: install
	$(BIN)/deptry . --extend-exclude benchmarks --extend-exclude notebooks \
		--optional-dependencies-dev-groups dev
	$(BIN)/deptry . --exclude '\.venv' --ignore DEP002

style: install
	$(BIN)/pytest tests/style

FAST := tests/sim tests/model tests/unit

# First what starts neither Ray nor an engine. The rest often waits for processes to start, so three
# workers run it side by side, each with a cluster of its own; a test that takes long is named
# meanwhile. `make check` runs tests/style.
test: install models
	@failed=; $(BIN)/pytest -n 2 -p tests.support.lanes $(FAST) || failed=1; \
		$(BIN)/pytest -n 3 -p tests.support.lanes -p tests.support.heartbeat \
			tests $(FAST:%=--ignore=%) --ignore=tests/style || failed=1; \
		test -z "$$failed"

retest: install models
	$(BIN)/pytest --last-failed --last-failed-no-failures none

# Properties with all their examples, of which `make test` draws a quarter.
model: install
	EXAMPLES_SHARE=$(SHARE) $(BIN)/pytest -n 2 tests/model tests/unit

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
