# Everything a checkout needs. `make setup` builds .venv and fetches the built-in model; the other targets set up first.
# The packages are installed again only when pyproject.toml changes; the model is checked each time (0.2 s) and fetched
# when it is absent; native CPU kernels are built where there is a C++ compiler. Both lie in $JAXINFER_CACHE, else in
# ~/.cache/jaxinfer.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
REFERENCE := .venv/.installed-reference
AOT := .venv-aot/.installed

.PHONY: help setup run test test-slow test-reference aot lint clean

help:
	@echo "make setup           .venv with everything for use and tests, and the built-in model"
	@echo "make run             one answer of the built-in model"
	@echo "make test            the quick tests"
	@echo "make test-slow       the slow tests"
	@echo "make test-reference  comparisons with torch and transformers (installs them: large)"
	@echo "make aot             compiles every kernel and program for TPUs and GPUs, with none here (installs compilers: 2 GB)"
	@echo "make lint            ruff and pyright"
	@echo "make clean           removes what tools left behind; keeps .venv and the model"

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[test]'
	touch $@

$(REFERENCE): $(INSTALLED)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[test,reference]'
	touch $@

# Of their own: with libtpu in it, .venv would look for a TPU at each start.
$(AOT): pyproject.toml
	test -x .venv-aot/bin/python || $(PYTHON) -m venv .venv-aot
	.venv-aot/bin/python -m pip install -q --disable-pip-version-check -e '.[test,aot]'
	touch $@

setup: $(INSTALLED)
	$(BIN)/python -m jaxinfer.fetch
	$(BIN)/python -m jaxinfer.native || echo "Going on without native kernels."

run: setup
	$(BIN)/python -m jaxinfer.generate "Explain paging in one sentence." --chat

test: setup
	$(BIN)/python -m pytest -q -n 2 -m "not slow and not aot"

test-slow: setup
	$(BIN)/python -m pytest -q -n 2 -m "slow and not aot"

test-reference: setup $(REFERENCE)
	$(BIN)/python -m pytest -q tests/reference

aot: $(AOT)
	.venv-aot/bin/python -m pytest -q -n 2 -m aot tests/aot tests/plan

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +
