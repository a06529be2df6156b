# zerogap: `make demo` and `make test` do all their own set-up on a fresh machine.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
STAMP   = $(VENV)/.installed
KERNELS = $(VENV)/.kernels
SANITIZE = kernels/build/sanitize
# The kernels for GPUs are checked without one, with any Triton from 3.6 on: make test-triton TRITON=3.9.0. It is no part of
# the CPU's environment, and not in constraints.txt, where it would stand against the one that a CUDA build of torch wants.
TRITON ?= 3.6.0
TRITON_VENV = .venv-triton/$(TRITON)
TRITON_STAMP = $(TRITON_VENV)/.installed
SMOLLM2 = .models/smollm2-135m-instruct

.PHONY: demo kernels test test-all test-portable test-sanitize test-no-compiler lint types smollm2 test-smollm2 \
  test-triton test-triton-all test-integrations test-peers bench-peers bench clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	touch $@

# The native CPU kernels are optional: without a C++ compiler everything runs on the portable backend, slower.
$(KERNELS): $(STAMP) $(wildcard kernels/cpp/* kernels/src/zerogap_kernels/*.py) kernels/CMakeLists.txt kernels/pyproject.toml
	if command -v $(CXX) >/dev/null; then \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check ./kernels && touch $@; \
	else \
	  echo "no C++ compiler ($(CXX)): the native CPU kernels are left out, the portable backend serves"; \
	fi

kernels: $(KERNELS)  ## build and install the native CPU kernels, if there is a C++ compiler

demo: $(KERNELS)  ## set up, train the small model with the gap at exactly 0, write a report on it
	run=runs/demo-$$(date +%Y%m%d-%H%M%S) && \
	$(BIN)/zerogap train configs/quickstart.toml run.dir=$$run && \
	$(BIN)/zerogap report $$run -o $$run/report.html

test: $(KERNELS)  ## the short form of every test but test-triton's; two at a time, since many of them wait
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --ignore=tests/ops/triton

test-all: $(KERNELS) smollm2  ## the full matrices and the real model
	$(BIN)/python -m pytest -m 'not peer'

test-portable: $(STAMP)  ## the laws on the portable backend
	ZEROGAP_BACKEND=portable $(BIN)/python -m pytest -q -n 2 tests/ops tests/models tests/engine tests/conformance \
	  tests/trainer tests/certify

test-no-compiler: $(STAMP)  ## what a machine without a C++ compiler gets
	$(BIN)/python -m pytest -q -m 'slow or not slow' tests/scripts/test_no_compiler.py

# A build of its own beside the installed one. Python was not built with the sanitizers, so they are loaded before it; leaks are its own.
test-sanitize: $(STAMP)  ## the kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'cmake>=3.20' ninja 'nanobind>=2.2'
	$(BIN)/cmake -S kernels -B $(SANITIZE) -G Ninja -DZG_SANITIZE=ON -DCMAKE_CXX_COMPILER=$(CXX) \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -Dnanobind_DIR="$$($(BIN)/python -m nanobind --cmake_dir)"
	$(BIN)/cmake --build $(SANITIZE)
	mkdir -p $(SANITIZE)/package/zerogap_kernels
	install kernels/src/zerogap_kernels/__init__.py $(SANITIZE)/_kernels*.so $(SANITIZE)/build.json $(SANITIZE)/package/zerogap_kernels
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 OMP_NUM_THREADS=1 PYTHONPATH=$(SANITIZE)/package \
	  $(BIN)/python -m pytest -q -p no:cacheprovider -m 'not slow and not sanitized_slow' kernels/tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

smollm2: $(SMOLLM2)/config.json  ## fetch and convert the real SmolLM2-135M-Instruct

$(SMOLLM2)/config.json: scripts/fetch_smollm2.py | $(STAMP)
	$(BIN)/python scripts/fetch_smollm2.py $(SMOLLM2)

test-smollm2: $(KERNELS) smollm2  ## the tests on the real model
	$(BIN)/python -m pytest -m model

test-integrations: $(STAMP)  ## the tests with real TRL and Ray, which come on top of the environment
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev,integrations]'
	$(BIN)/python -m pytest -m 'not peer and not model' tests/integrations tests/watchdog/test_ray.py

$(TRITON_STAMP): pyproject.toml constraints.txt
	test -x $(TRITON_VENV)/bin/python || $(PYTHON) -m venv $(TRITON_VENV)
	$(TRITON_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev]' \
	  triton==$(TRITON)
	touch $@

test-triton: $(TRITON_STAMP)  ## the GPU kernels without a GPU: built ahead of time and under Triton's interpreter
	$(TRITON_VENV)/bin/python -m pytest -q -n 2 --dist worksteal tests/ops/triton tests/contracts/test_gpus_page.py

test-triton-all: $(TRITON_STAMP)  ## every configuration of every kernel for every architecture: an hour or two
	$(TRITON_VENV)/bin/python -m pytest -m slow tests/ops/triton

test-peers: $(STAMP) smollm2  ## zerogap probe against real vLLM on the CPU, in an environment of its own
	$(BIN)/python -m pytest -m peer tests/peers

bench-peers: $(STAMP) smollm2  ## the pinned peers of the benchmark, each in an environment of its own
	$(BIN)/python bench/peer_setup.py $(SMOLLM2)

bench: $(KERNELS) bench-peers  ## speed against the peers, in turn: wants a quiet machine and about an hour
	$(BIN)/python bench/speed.py $(SMOLLM2) --json bench/data/speed.json

clean:
	rm -rf $(VENV) .venv-triton build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
