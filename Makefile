# Needs Python 3.10 or later and make, nothing else. `make` lists the targets.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --quiet --disable-pip-version-check
WORKERS ?= 2
PYTEST_ARGS ?=

TF_CPP_MIN_LOG_LEVEL ?= 3
export TF_CPP_MIN_LOG_LEVEL
# Where Python is told to write no bytecode, each process of tests would compile all of it anew: of
# twenty seconds until the first test runs, pytest's rewriting of the asserts takes fourteen.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help venv install quick test long mutants fresh demo bench docs types lint format wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s  %s\n", $$1, $$2}' Makefile

venv: $(VENV)/.created ## make the virtual environment .venv

install: $(VENV)/.installed ## install the package into .venv (editable) with what the tests need

quick: install ## lint and run quick tests, a minute (ROOM=layers: those of a room)
	@lint=0; $(PY) -m ruff check . || lint=1; \
	$(PY) -m pytest -q -n $(WORKERS) --dist worksteal --quick$(if $(ROOM),=40 \
	  $(or $(shell find tests -type d -name '$(ROOM)'),tests/$(ROOM))) $(PYTEST_ARGS) && \
	exit $$lint

# The types are checked beside the tests: mypy is one process, and would leave the other cores idle.
test: install ## lint, check types, run all tests (PYTEST_ARGS="-k word" selects, WORKERS=4: 4 processes)
	@mkdir -p build; lint=0; $(PY) -m ruff check . || lint=1; \
	$(PY) tests/check_types.py > build/types.txt 2>&1 & types=$$!; \
	$(PY) -m pytest -q -n $(WORKERS) --dist worksteal $(PYTEST_ARGS); failed=$$?; \
	wait $$types || lint=1; cat build/types.txt; \
	test $$failed -eq 0 && exit $$lint; exit $$failed

long: install ## run the long tests, one after the other: soaks, kills, large draws
	$(PY) -m pytest -q -m long -n 0 $(PYTEST_ARGS)

mutants: install ## change the package at 80 random places, one at a time: do the tests notice?
	$(PY) tests/mutants.py $(MUTANTS_ARGS)

fresh: install ## install a wheel into a fresh environment, run the README's blocks there (minutes)
	$(PY) tests/packaging/fresh_install.py

demo: install ## train a small model on a 2x2 mesh of virtual CPU devices and write text with it
	$(PY) examples/demo.py

bench: install ## measure against plain TensorFlow, PyTorch, JAX and others, print one table
	@test $(VENV)/.bench -nt setup.py || { \
	  echo "Installing what the benchmarks compare with (PyTorch, JAX and others) ..."; \
	  if $(PIP) install -e '.[bench]'; then touch $(VENV)/.bench; \
	  else echo "They could not be installed: the table goes without their rows."; fi; }
	$(PY) -m benchmarks.run

docs: install ## build the documentation site into site/ (guides, API reference, pictures)
	@test $(VENV)/.docs -nt setup.py || { $(PIP) install -e '.[docs]' && touch $(VENV)/.docs; }
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "The site: site/index.html"

types: install ## check the types with mypy, strictly
	$(PY) tests/check_types.py

lint: install ## check style and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: install ## repair style and formatting where ruff can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

wheel: install ## build a wheel into dist/
	rm -rf build
	$(PY) -m build --wheel --no-isolation
	rm -rf build

clean: ## remove everything that make, Python and the tools made here, .venv too
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "There is no '$(PYTHON)' here. Name a Python 3.10 or later: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "Mesh TensorFlow needs Python 3.10 or later; $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
	    "Name another: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 14))' || \
	  echo "Note: TensorFlow 2.16 to 2.21 may have no build for $$($(PYTHON) -V 2>&1); 3.10 to 3.13 are safe."
	@echo "Making the virtual environment $(VENV) ..."
	@$(PYTHON) -m venv --clear $(VENV) || { \
	  echo "$(PYTHON) cannot make virtual environments (Debian, Ubuntu: install python3-venv)."; \
	  rm -rf $(VENV); exit 1; }
	@touch $@

# First a new pip: that of Python 3.10 takes more than ten minutes to choose the versions.
$(VENV)/.installed: $(VENV)/.created setup.py pyproject.toml
	@echo "Installing into $(VENV): the first time pip fetches TensorFlow (250 to 600 MB) ..."
	@$(PIP) install --upgrade pip
	@$(PIP) install -e '.[test]' > $(VENV)/install.log 2>&1 || { cat $(VENV)/install.log; exit 1; }
	@touch $@
