# Two commands: `make demo` and `make test`. Both prepare .venv first, once.
#
# A Python of 3.11 or newer is looked for; name another one with `make PYTHON=/path/to/python setup`.

PYTHON ?=
VENV := .venv
BIN := $(VENV)/bin
comma := ,
READY := $(VENV)/.ready
RUNTIME := $(VENV)/.runtime
CLIENTS := .venv-clients
TOOLS := .venv-tools
OLDEST := .venv-oldest
MYPY_TREE := build/mypy

# What `make soak` and `make fuzz` take, and which readers of tests/corpora the latter tries.
HOURS ?= 1
MINUTES ?= 5
READERS ?=

# The GPU's targets need no .venv: the Python that has torch with CUDA runs them.
GPU_PYTHON ?= $(or $(PYTHON),python3)
GPU_PYTHON_VERSION ?= 3.12
RESULTS ?= benchmarks/results
BUDGET ?= 480

# Tests run in so many processes, each file's in one. No test knows of it. Files are taken in the
# order of tests/conftest.py: xdist's own has those with many tests first, not those that take long.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Tests start a hundred processes: each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo check test test-oldest newest first-changes clients api-fuzz docs simulate fuzz soak audit sbom clients-env kernels lint mypy-tree format wheel wheels clean
.PHONY: gpu-check gpu-test gpu-bench gpu-wheels

help:
	@echo "make demo    set up .venv, run a program on a real model (the embedded one where it cannot be had)"
	@echo "make check   two minutes: what to run before each commit"
	@echo "make test    all tests"
	@echo "make test-oldest  all tests, with the lowest versions that pyproject.toml admits"
	@echo "make newest  which dependencies have newer releases than the tested ones"
	@echo "make clients the tests with clients and linters whose packages are heavy, in an environment of its own"
	@echo "make first-changes  each change that CONTRIBUTING.md shows, made in a copy of the tree and tested there"
	@echo "make api-fuzz  all that the OpenAPI document admits, and much that it does not (a minute)"
	@echo "make simulate SEEDS=0:100  worlds of clients, a gateway and engines with faults, on a virtual clock"
	@echo "make docs    the site of docs/, in build/site; warnings are errors"
	@echo "make fuzz MINUTES=5  inputs that reach more of what reads strangers' bytes (tests/corpora)"
	@echo "make soak HOURS=1    a thousand clients, killed engines: does memory stay flat?"
	@echo "make audit   known vulnerabilities of the packages in .venv (needs a network)"
	@echo "make sbom    what .venv consists of, as CycloneDX: build/sbom.json"
	@echo "make kernels compile all Triton kernels for sm_80 and sm_90, without a GPU"
	@echo "make gpu-check BUDGET=480  on a machine with a GPU: smoke, tests and benchmark in so many seconds,"
	@echo "                without .venv (gpu-test, gpu-bench: one of them; gpu-wheels: what to bring there)"
	@echo "make setup   set up .venv only"
	@echo "make lint    ruff and mypy"
	@echo "make format  let ruff format the code"
	@echo "make wheel   build the wheels, install this machine's into fresh environments and try it"
	@echo "make wheels  the same for glibc 2.28 and newer, into dist/: compiled by Zig, whose package takes 100 MB"
	@echo "make clean   remove .venv and everything built"

setup: $(READY)

# The stamps make the second run free: pip is asked again only when the requirements change.
define environment
	@for python in $(PYTHON) python3 python3.12 python3.11 python3.13 python3.14 python; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    "$$python" scripts/setup_env.py --venv $(VENV) --editable $(1) && touch $(2); exit; \
	  elif [ -n "$(PYTHON)" ]; then \
	    echo "PYTHON=$(PYTHON) is not Python 3.11 or newer" >&2; exit 1; \
	  fi; \
	done; \
	echo "Python 3.11 or newer is needed and none was found; name one: make PYTHON=... setup" >&2; \
	exit 1
endef
REQUIREMENTS := pyproject.toml constraints.txt scripts/setup_env.py

$(READY): $(REQUIREMENTS)
	$(call environment,--extras runtime$(comma)test$(comma)clients$(comma)docs --models smollm2,$(RUNTIME) $@)

# What a program needs, without what tests and docs need: a demo should not wait for these.
$(RUNTIME): $(REQUIREMENTS)
	$(call environment,--extras runtime,$@)

# The first compilation takes a minute or more: it is done where it can be seen.
demo: $(RUNTIME)
	-@$(BIN)/python -m rootlace.kernels.native
	@$(BIN)/python examples/quickstart.py

# Native kernels are compiled before, so that no test with a time limit pays for it; without a
# compiler the tests of them are skipped.
check: $(READY)
	-@$(BIN)/python -m rootlace.kernels.native
	$(BIN)/ruff check .
	$(PYTEST) -m "not slow"

# The GPU's tests run on the CPU, so that they themselves are tested; gpu-test runs them on a GPU.
test: $(READY)
	-@$(BIN)/python -m rootlace.kernels.native
	$(PYTEST) --on-cpu

# An environment with the packages of one extra, which looks into .venv for all that it has not got.
define beside
	$(BIN)/python -m venv --clear --upgrade-deps $(@D)
	$(BIN)/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
	  > $$($(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/venv.pth
	$(BIN)/python -c "import tomllib; \
	  print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['$(1)'])" \
	  | xargs $(@D)/bin/python -m pip install --quiet
endef

$(CLIENTS)/.ready: pyproject.toml $(READY)
	$(call beside,clients-all)
	-$(CLIENTS)/bin/python -m pip install --quiet --no-deps sglang==0.5.23  # its server would need a GPU's packages
	@touch $@

# Vercel's `ai`, where there is npm; else its tests are skipped.
tests/clients/vercel/node_modules/.ready: tests/clients/vercel/package.json
	-if command -v npm >/dev/null; then \
	  npm install --prefix tests/clients/vercel --no-package-lock --no-audit --no-fund && touch $@; fi

clients-env: $(CLIENTS)/.ready tests/clients/vercel/node_modules/.ready

clients: clients-env
	$(CLIENTS)/bin/python -m pytest -n $(WORKERS) --dist loadfile tests/clients tests/deploy tests/test_deploy.py --ignore tests/clients/test_page.py --ignore tests/clients/test_pydantic_ai.py

# The lowest versions that pyproject.toml admits of what it names; uv finds them.
$(OLDEST)/.ready: $(REQUIREMENTS) $(READY)
	$(BIN)/python -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet uv==0.13.9
	@mkdir -p build
	$(OLDEST)/bin/uv pip compile pyproject.toml --extra runtime --extra test --extra clients \
	  --python $(OLDEST)/bin/python --resolution lowest-direct --no-annotate --quiet --output-file build/lowest.txt
	$(BIN)/python scripts/setup_env.py --venv $(OLDEST) --editable --extras runtime,test,clients --constraints build/lowest.txt
	@touch $@

test-oldest: $(OLDEST)/.ready
	$(OLDEST)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --on-cpu

first-changes: $(READY)
	$(BIN)/python scripts/first_changes.py --run

newest: $(READY)
	$(BIN)/python scripts/newest.py

api-fuzz: $(CLIENTS)/.ready
	$(CLIENTS)/bin/python scripts/api_fuzz.py

SEEDS ?= 0:100
simulate: $(READY)
	$(BIN)/python -m tests.deterministic --seeds $(SEEDS) --jobs $(WORKERS)

docs: $(READY)
	$(BIN)/python scripts/build_site.py build/site

$(TOOLS)/.ready: pyproject.toml $(READY)
	$(call beside,tools)
	@touch $@

fuzz: $(TOOLS)/.ready
	$(TOOLS)/bin/python -m scripts.fuzz --minutes $(MINUTES) $(READERS)

soak: $(READY)
	$(BIN)/python -m benchmarks.soak --hours $(HOURS) --json build/soak.json

# The audit asks a database for each package and version; what is consistent is checked without.
audit: $(TOOLS)/.ready
	$(BIN)/python -m pip check
	$(BIN)/python scripts/audit.py $(TOOLS)/bin/pip-audit --path $$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")

sbom: $(TOOLS)/.ready
	@mkdir -p build
	$(TOOLS)/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible --of JSON -o build/sbom.json $(BIN)/python

kernels: $(READY)
	$(BIN)/python scripts/compile_kernels.py

gpu-check:
	@$(GPU_PYTHON) scripts/gpu_check.py all --budget $(BUDGET) --results $(RESULTS)

gpu-test:
	@$(GPU_PYTHON) scripts/gpu_check.py test --budget $(BUDGET) --results $(RESULTS)

gpu-bench:
	@$(GPU_PYTHON) scripts/gpu_check.py bench --budget $(BUDGET) --results $(RESULTS)

gpu-wheels:
	@$(GPU_PYTHON) scripts/gpu_check.py wheels --python-version $(GPU_PYTHON_VERSION)

lint: $(READY) mypy-tree
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=$(MYPY_TREE) $(BIN)/mypy -p rootlace
	MYPYPATH=$(MYPY_TREE) $(BIN)/mypy benchmarks scripts examples/demo_model
	MYPYPATH=$(MYPY_TREE):examples $(BIN)/mypy --explicit-package-bases examples/*.py

# Imports say `rootlace.runtime`, the folder is runtime/: links give mypy a tree that agrees.
mypy-tree:
	@rm -rf $(MYPY_TREE) && mkdir -p $(MYPY_TREE)/rootlace
	@for entry in frontend/* runtime kernels; do \
	  ln -s ../../../$$entry $(MYPY_TREE)/rootlace/$$(basename $$entry); \
	done

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(READY)
	$(BIN)/python scripts/check_wheel.py

wheels: $(READY)
	$(BIN)/python -m pip install --quiet "ziglang==0.17.1"
	$(BIN)/python scripts/check_wheel.py --into dist

clean:
	rm -rf $(VENV) $(CLIENTS) $(TOOLS) tests/clients/vercel/node_modules build dist rootlace.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
