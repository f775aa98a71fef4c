# make test | test-slow | test-all | test-gpu | fuzz | machine-code | lint | docs | demo | vendor
#
# PYTHON is used as it is when it holds a CUDA build of torch 2.11 or newer. Otherwise a .venv is made from it, with the
# CPU set pinned in constraints/cpu.txt.

PYTHON ?= python3

# Read from the file and not by `import torch`, which takes seconds.
CUDA_TORCH := $(shell $(PYTHON) -c 'import importlib.util, pathlib, runpy; \
	facts = runpy.run_path(pathlib.Path(importlib.util.find_spec("torch").origin).with_name("version.py")); \
	print("yes" if facts["cuda"] and tuple(map(int, facts["__version__"].split(".")[:2])) >= (2, 11) else "")' 2>/dev/null)

ifeq ($(CUDA_TORCH),yes)
  RUN := $(PYTHON)
  # One stamp an interpreter, kept here: the interpreter's own folder is not ours.
  STAMP := build/$(shell printf %s "$(PYTHON)" | tr -c 'A-Za-z0-9' _).
else
  RUN := .venv/bin/python
  STAMP := .venv/ready.
endif

# OpenMP's threads otherwise spin while they wait: beside other work on two cores everything takes several times as long.
export OMP_WAIT_POLICY ?= PASSIVE

# As many tests at a time, where pytest-xdist is there (a machine without a network may lack it).
JOBS ?= 2
SIDE_BY_SIDE = $$($(RUN) -c "import importlib.util as u; print('-n $(JOBS) --dist worksteal' if u.find_spec('xdist') else '')")

PIP := $(RUN) -m pip --disable-pip-version-check --quiet
.PHONY: test test-slow test-all test-gpu fuzz machine-code lint docs demo vendor clean
.DELETE_ON_ERROR:

test: $(STAMP)test                                ## the suite without the slow and the GPU tests
	$(RUN) -m pytest $(SIDE_BY_SIDE) -m "not slow and not gpu" $(ARGS)

test-slow: $(STAMP)test $(STAMP)demo $(STAMP)frameworks  ## the slow ones only, without the exhaustive ones
	$(RUN) -m pytest $(SIDE_BY_SIDE) -m "slow and not exhaustive and not gpu" $(ARGS)

test-all: $(STAMP)test $(STAMP)demo $(STAMP)frameworks   ## everything this machine can run
	$(RUN) -m pytest $(SIDE_BY_SIDE) $(ARGS)

test-gpu: $(STAMP)test                            ## the tests that need a GPU
	$(RUN) -m pytest -m gpu $(ARGS)

# SEED=1 draws the models of that seed again.
SEED := $(or $(SEED),$(shell od -An -N3 -tu4 /dev/urandom | tr -d ' '))

fuzz: $(STAMP)test                                ## N models drawn at random (N=2000), and N programs that write in place
	@echo "make fuzz N=$(or $(N),100) SEED=$(SEED)"
	FUZZ_MODELS=$(or $(N),100) FUZZ_SEED=$(SEED) $(RUN) -m pytest tests/models/test_fuzz.py tests/models/test_write_fuzz.py --show-capture=no --tb=short $(ARGS)

machine-code: $(STAMP)test                        ## the kernels whose machine code is not the recorded one; ARGS="h200 l40s" for these GPUs
	$(RUN) benchmarks/targets.py --check $(ARGS)

lint: $(STAMP)dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

docs: $(STAMP)docs                                ## the site, into build/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

demo: $(STAMP)demo                                ## train a small Llama twice, bf16 and FP8; results in out/
	$(RUN) examples/train_text.py $(ARGS)

VENDOR := te_dynamo/inspect/page/vendor

vendor:                                           ## the libraries of explain's page, by the versions in its package.json; needs npm
	npm install --prefix $(VENDOR) --ignore-scripts --no-audit --no-fund
	cd $(VENDOR)/node_modules && for file in tabulator-tables/dist/js/tabulator.min.js tabulator-tables/dist/css/tabulator.min.css \
	  cytoscape/dist/cytoscape.min.js cytoscape-dagre/dist/cytoscape-dagre.min.js; do \
	  sed '/sourceMappingURL=/d' $$file > ../$$(basename $$file); done
	cd $(VENDOR)/node_modules && for name in tabulator-tables cytoscape cytoscape-dagre @dagrejs/dagre; do \
	  echo "== $$name"; cat $$name/LICENSE; echo; done > ../LICENSES
	rm -rf $(VENDOR)/node_modules

clean:
	rm -rf .venv build out

# $(STAMP)<extra>: this checkout and that extra of pyproject.toml are installed.
.venv/ready.%: pyproject.toml constraints/cpu.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	$(PIP) install -c constraints/cpu.txt -e ".[$*]"
	touch $@

# Into an interpreter that is not ours: the package alone, from this folder and so also without a network; then what the
# extra lacks, if anything. Its torch and Triton already satisfy pyproject.toml, so pip leaves them as they are.
build/%: pyproject.toml
	mkdir -p build
	$(PIP) install --no-index --no-deps --no-build-isolation -e . 2>/dev/null || $(PIP) install --no-deps -e .
	$(PIP) install --no-build-isolation -e ".[$(lastword $(subst ., ,$*))]" 2>/dev/null \
	  || $(PIP) install -e ".[$(lastword $(subst ., ,$*))]" \
	  || echo "te_dynamo: some packages of the extra are missing and could not be installed; going on without them"
	touch $@
