# `make demo` and `make test` also set everything up, on a new machine, too. `make demo` installs only what the demo needs.
PYTHON ?= python3
BIN := .venv/bin
DEMO := .venv/.demo
READY := .venv/.ready
# --no-compile: Python compiles the files that it imports, which are a small part of torch
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile --progress-bar off -c constraints.txt
# pip writes to a log, which is shown if pip fails
quiet = > $(1) 2>&1 || { cat $(1); echo "The set-up failed: pip's output is above, and in $(1)."; exit 1; }

.PHONY: demo test lint mutations sanitize clean

demo: $(DEMO)
	@$(BIN)/onepass demo

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist worksteal tests/backends/gpu/test_interpreter.py tests/core/test_toy_norm.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

$(DEMO): pyproject.toml constraints.txt Makefile
	@echo "Installing torch, matplotlib and rich into .venv: one or two minutes, or longer if torch must be downloaded ..."
	@$(PYTHON) -m venv .venv
	@$(PIP) -e ".[demo]" $(call quiet,.venv/demo.log)
	@touch $@
	@echo "Installed."

# timm has a folder of its own: its torchvision may be built for another torch, and transformers fails if it sees that one.
# So both installations are independent, and run at the same time.
$(READY): $(DEMO)
	@echo "Installing what the tests need (pytest, pyright, transformers, diffusers, monai, timm): two to five minutes ..."
	@($(PIP) --no-deps --upgrade --target .venv/timm timm torchvision $(call quiet,.venv/timm.log)) & timm=$$!; failed=0; \
	($(PIP) -e ".[dev]" $(call quiet,.venv/dev.log)) || failed=1; \
	wait $$timm || failed=1; exit $$failed
	@touch $@
	@echo "Installed."

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
	$(SANITIZED) $(BIN)/python -m onepass verify
	$(SANITIZED) $(BIN)/python -m benchmarks.random_problems --count 500
	$(SANITIZED) $(BIN)/python -W ignore -m benchmarks.random_programs --count 5000

clean:
	rm -rf .venv
