# Everything builds its own .venv and installs what is missing; needs Python 3.11 or later and make.
#   make demo [DATA=drive.csv]   make test   make check   make bench   make proto   make spec-coverage   make config-reference   make clean
#   make simulate [SEEDS=10000 START=0]   make chaos   make interop   make attack [ATTACK=polls SECONDS=20]

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DATA   ?=
ARGS   ?=
SEEDS  ?= 2000
START  ?= 0
ATTACK ?=
SECONDS ?=

.PHONY: demo test check format simulate chaos attack interop bench proto spec-coverage config-reference wheel clean
.DEFAULT_GOAL := test

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "up-streamer needs Python 3.11 or later, this is " + sys.version.split()[0] + ": make PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed: on Debian, apt-get install python3-venv"; exit 1; }
	@echo "installing up-streamer and what it needs into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/up-streamer demo $(if $(DATA),--data '$(DATA)') $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m transports.mqtt5.broker --ensure || test "$$CI" != true
	@$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_import_rules.py
	@$(BIN)/python tools/spec_coverage.py --check
	@$(BIN)/python tools/config_reference.py --check

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

simulate: $(STAMP)
	@$(BIN)/python -m simulation --seeds $(SEEDS) --start $(START) $(ARGS)

bench: $(STAMP)
	@$(BIN)/python -m transports.mqtt5.broker --ensure
	@$(BIN)/python -m bench $(ARGS)

chaos: $(STAMP)
	@$(BIN)/python -m transports.mqtt5.broker --ensure || true  # without one, most of it is skipped and says so
	@$(BIN)/python -m chaos $(ARGS)

attack: $(STAMP)
	@$(BIN)/python -m transports.mqtt5.broker --ensure
	@$(BIN)/python -m tests.security $(if $(ATTACK),--only '$(ATTACK)') $(if $(SECONDS),--seconds '$(SECONDS)') $(ARGS)

interop: $(STAMP)
	@$(BIN)/python -m transports.mqtt5.broker --ensure || test "$$CI" != true
	@$(BIN)/python -m pytest tests/interop $(ARGS)

proto: $(STAMP)
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tools/proto.py

spec-coverage: $(STAMP)
	@$(BIN)/python tools/spec_coverage.py

config-reference: $(STAMP)
	@$(BIN)/python tools/config_reference.py

wheel: $(STAMP)
	@$(BIN)/python -m build --wheel --outdir dist .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist out
