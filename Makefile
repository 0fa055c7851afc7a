# Everything builds its own .venv and installs what is missing; needs Python 3.11 or later and make.
#   make demo [DATA=drives]   make affected [BASE=REF SECONDS=45 ARGS=--list]   make test   make test-rest   make test-all   make check   make bench   make proto   make spec-coverage   make config-reference   make clean
#   make bench [ARGS="--legs disk --seconds 60" | ARGS=--curves | ARGS="--peer-rust BINARY"]
#   make fuzz [MINUTES=10]   make simulate [SEEDS=10000 START=SEED]   make chaos   make operate   make spark-cluster   make interop   make brokers   make attack [ATTACK=polls SECONDS=20]
#   make house [ARGS=--walks]   make docs   make lock   make lowest [ARGS=tests/...]   make audit       LOCK= installs the newest versions that pyproject.toml allows
# The core is compiled where there is a C compiler (docs/installing.md): COMPILED=0 runs the same Python as it is, COMPILED=1 fails where nothing can be compiled

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
LOCK   ?= requirements.lock
LOWEST := .venv-lowest
BUILDER := .venv-build
WRITER := .venv-docs
DATA   ?=
ARGS   ?=
SEEDS  ?= 2000
ifndef START
START  := $(shell $(PYTHON) -c 'import random; print(random.randrange(1_000_000))')
endif
MINUTES ?= 10
ATTACK ?=
SECONDS ?=
BASE   ?=
COMPILED ?=
WORKERS ?= 4  # of pytest-xdist: half of the time of a test is waiting, so more than there are processors
PYTEST  := -m pytest -n $(WORKERS) --dist worksteal --durations 30 --durations-min 5
FAST    := -m "not full" --hypothesis-profile fast
unexport PYTHONDONTWRITEBYTECODE  # without bytecode each process of a test compiles all modules again: a fifth of all that is computed
ifneq ($(COMPILED),)
export UP_STREAMER_COMPILED := $(COMPILED)
endif

.PHONY: core demo affected test test-rest test-interpreted test-all check format house fuzz simulate chaos operate attack interop brokers spark-cluster bench proto spec-coverage config-reference wheel docs lock lowest audit clean
.DEFAULT_GOAL := test

$(STAMP): pyproject.toml $(LOCK)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "up-streamer needs Python 3.11 or later, this is " + sys.version.split()[0] + ": make PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed: on Debian, apt-get install python3-venv"; exit 1; }
	@echo "installing up-streamer and what it needs into $(VENV) ..."
ifneq ($(LOCK),)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement $(LOCK)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
else
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,java,supply]'
endif
	@touch $@

core: $(STAMP)  # built anew when a source has changed, and says which it is where it can't be
	@$(BIN)/python hatch_build.py

demo: core  # with the recorded drives of ../shared, if they are there
	@$(if $(findstring --without-mqtt,$(ARGS)),:,$(BIN)/python -m tools.mosquitto >/dev/null || true)
	@$(BIN)/up-streamer demo $(if $(DATA),--data '$(DATA)',$(if $(wildcard ../shared/data/obd/*.csv),--data ../shared/data/obd --seconds 1800)) $(ARGS)

affected: $(STAMP)  # a minute of the tests that a change touches, nearest first; nothing is compiled for it
	@$(BIN)/python -m tools.mosquitto || test "$$CI" != true
	@$(BIN)/python -m tools.affected $(if $(BASE),--base '$(BASE)') $(if $(SECONDS),--seconds '$(SECONDS)') \
	  $(PYTEST) --dist load --maxschedchunk 1 $(FAST) $(ARGS)

test: core  # docs/developing.md: what it leaves out, and how to run one test
	@$(BIN)/python -m tools.mosquitto || test "$$CI" != true
	@$(BIN)/python $(PYTEST) $(FAST) $(ARGS)

test-rest: core  # what `make test` leaves out
	@$(BIN)/python -m tools.mosquitto || test "$$CI" != true
	@$(BIN)/python $(PYTEST) -m full $(ARGS)

test-interpreted: $(STAMP)  # where compiled code could differ: the fast tests of the packages that hold compiled modules
	@$(BIN)/python -m tools.mosquitto || test "$$CI" != true
	@UP_STREAMER_COMPILED=0 $(BIN)/python $(PYTEST) $(FAST) \
	  $$($(BIN)/python -c "import hatch_build; print(*sorted({'tests/' + name.split('.')[0] for name in hatch_build.modules()}))") $(ARGS)

test-all: core  # every test; with COMPILED=0 also how much of the product they run through: compiled code can't be traced
	@$(BIN)/python -m tools.mosquitto || test "$$CI" != true
	@$(BIN)/python $(PYTEST) $(if $(filter 0,$(COMPILED)),--cov --cov-report=) $(ARGS)
	@$(if $(filter 0,$(COMPILED)),$(if $(ARGS),:,$(BIN)/python -m tools.code_coverage),:)

check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m tools.prose
	@$(BIN)/python -m pytest -q tests/test_import_rules.py
	@$(BIN)/python tools/spec_coverage.py --check
	@$(BIN)/python tools/config_reference.py --check
	@$(BIN)/python tools/reference.py --check

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

fuzz: $(STAMP)  # of compiled code it does not see what it has reached
	@UP_STREAMER_COMPILED=0 $(BIN)/python -m campaigns.fuzz --minutes $(MINUTES) $(ARGS)

house: $(STAMP)  # lines, what stands twice, and how far three messages walk; --tree DIR counts another checkout
	@UP_STREAMER_COMPILED=0 $(BIN)/python -m tools.house $(ARGS)

simulate: core  # worlds, and the tests that run with many seeds; other seeds each time, unless START names the first
	@$(BIN)/python -m campaigns.simulation --seeds $(SEEDS) --start $(START) $(ARGS)
	@$(if $(ARGS),:,echo "tests with the seeds from $(START) on" && FIRST_SEED=$(START) $(BIN)/python $(PYTEST) -m seeded -q)

bench: core
	@$(BIN)/python -m tools.mosquitto
	@$(BIN)/python -m campaigns.bench $(ARGS)

chaos: core
	@$(BIN)/python -m tools.mosquitto || true  # without one, most of it is skipped and says so
	@$(BIN)/python -m campaigns.chaos $(ARGS)

operate: core  # every operation of two vehicles and a cloud under load; ARGS="--soak --hours 1": is everything flat?
	@$(BIN)/python -m tools.mosquitto || true
	@$(BIN)/python -m campaigns.operate $(ARGS)

attack: core
	@$(BIN)/python -m tools.mosquitto
	@$(BIN)/python -m tests.security $(if $(ATTACK),--only '$(ATTACK)') $(if $(SECONDS),--seconds '$(SECONDS)') $(ARGS)

spark-cluster: core  # a master and two workers on loopback; executors, Python workers and a node are killed (Linux)
	@$(BIN)/python -m pytest tests/spark/test_spark_cluster.py $(ARGS)

interop: core
	@$(BIN)/python -m tools.mosquitto || test "$$CI" != true
	@$(BIN)/python -m pytest tests/interop --timeout 1800 $(ARGS)  # the first test builds Zenoh in Rust

brokers: core  # of other makes, built once from the package registries: needs a JDK and Maven, Go, cargo; skips what it can't have
	@$(BIN)/python -m tools.mosquitto || test "$$CI" != true
	@$(BIN)/python -m pytest tests/brokers --timeout 1800 $(ARGS)

proto: $(STAMP)
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tools/proto.py

spec-coverage: $(STAMP)
	@$(BIN)/python tools/spec_coverage.py

config-reference: $(STAMP)
	@$(BIN)/python tools/config_reference.py
	@$(BIN)/python tools/reference.py

$(BUILDER)/.installed: requirements-build.lock
	@$(PYTHON) -m venv $(BUILDER)
	@$(BUILDER)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements-build.lock
	@touch $@

wheel: $(BUILDER)/.installed  # one for every Python and machine, and one with the compiled core for this one; pip takes the better that fits
	@UP_STREAMER_COMPILED=0 $(BUILDER)/bin/python -m build --wheel --no-isolation --outdir dist .
	@$(if $(filter 0,$(COMPILED)),:,$(BUILDER)/bin/python -m build --wheel --no-isolation --outdir dist .)

$(WRITER)/.installed: requirements-docs.lock
	@$(PYTHON) -m venv $(WRITER)
	@$(WRITER)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements-docs.lock
	@touch $@

docs: $(WRITER)/.installed  # the site, into dist/site: every link is followed, and its pages load nothing from elsewhere
	@$(WRITER)/bin/python tools/docs_site.py

lock: $(STAMP)  # the newest versions that pyproject.toml allows, for every Python and platform; then `make test`
	@$(BIN)/python tools/lock.py

lowest: $(STAMP)  # are the lower bounds in pyproject.toml true?
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(LOWEST)
	@$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct --editable '.[test,java]'
	@$(LOWEST)/bin/python -m tools.mosquitto || test "$$CI" != true
	@$(LOWEST)/bin/python $(PYTEST) $(FAST) $(ARGS)

audit: $(STAMP)  # known weaknesses in what is pinned, and what a gateway is made of (CycloneDX)
	@mkdir -p dist
	@$(BIN)/cyclonedx-py requirements deploy/requirements.lock --pyproject pyproject.toml --output-reproducible --output-format JSON --output-file dist/sbom.json
	@$(BIN)/pip-audit --strict --disable-pip --require-hashes --requirement requirements.lock $(ARGS)  # strict: who could not look has found nothing

clean:
	rm -rf $(VENV) $(LOWEST) $(BUILDER) $(WRITER) uprotocol/_compiled .mypy_cache .ruff_cache .pytest_cache .hypothesis dist out
