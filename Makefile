# `make demo` and `make test` also set everything up, on a new machine, too.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lint mutations sanitize clean

demo: $(READY)
	$(BIN)/onepass demo

test: lint
	$(BIN)/python -m pytest -n 2
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 tests/backends/gpu/test_interpreter.py tests/core/test_toy_norm.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# timm has a folder of its own: its torchvision may be built for another torch, and transformers fails if it sees that one
$(READY): pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt --no-deps --upgrade --target .venv/timm timm torchvision
	touch $@

# Not with --quiet, which also hides the warnings from --strict. The variable hides that Material reaches its end of life in 2027
.PHONY: docs
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

mutations: $(READY)
	$(BIN)/python tests/mutations.py

# The C kernels with the address and undefined-behaviour sanitizers: the verify suite, random problems and random programs
ASAN := $(shell gcc -print-file-name=libasan.so 2>/dev/null):$(shell gcc -print-file-name=libubsan.so 2>/dev/null)
SANITIZED := LD_PRELOAD=$(ASAN) ASAN_OPTIONS=detect_leaks=0 ONEPASS_CPU=c CC="gcc -fsanitize=address,undefined -fno-sanitize-recover=all -g"
sanitize: $(READY)
	$(SANITIZED) $(BIN)/python -m onepass.cli verify
	$(SANITIZED) $(BIN)/python -m benchmarks.random_problems --count 500
	$(SANITIZED) $(BIN)/python -W ignore -m benchmarks.random_programs --count 5000

clean:
	rm -rf .venv
