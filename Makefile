# Everything a newcomer or a developer types. `make demo` and `make test` set up all they need by themselves.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# uv takes the same extra folder of wheels as pip, unless it has its own.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# Tests and jobs start hundreds of processes: whoever forbids bytecode makes each of them compile everything again.
export PYTHONDONTWRITEBYTECODE :=
RUN_EXTRAS := .[engine,examples]
DEV_EXTRAS := .[engine,examples,dev]
INSTALL = if command -v uv >/dev/null 2>&1; then VIRTUAL_ENV=$(abspath $(VENV)) uv pip install $$([ -t 2 ] || echo -q) -c constraints.txt $(1); \
	else set -o pipefail; $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(1) | $(PROGRESS); fi
# Of all that pip says: downloads of 10 MB and more, and the long step at the end.
PROGRESS = sed -unE 's,^ +(Downloading|Using cached) (.*/)?([^ /]+ [(]([0-9]{2}[0-9.]* M|[0-9.]+ G)B[)]).*,  \1 \3,p; \
	s,^Installing collected packages.*,  installing what is here now,p'

.PHONY: setup demo check fast-rest fast-web fast-web-2 fast-torch lint style contracts types test real deep machines sim mutants bench ui ui-test docs clean

setup: $(VENV)/.setup-run ## virtual environment with what a user needs
$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "there is no $(PYTHON) on PATH; Rota needs Python 3.11 or newer, name it: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Rota needs Python 3.11 or newer, and this is %d.%d; name another one: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.11" % v[:2])'
	$(PYTHON) -m venv $(VENV)
$(VENV)/.setup-run: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing Rota with its engine into $(VENV) (torch and Ray: some minutes the first time)"
	@$(call INSTALL,-e '$(RUN_EXTRAS)')
	@touch $@
$(VENV)/.setup-dev: pyproject.toml constraints.txt $(VENV)/.setup-run
	@echo "installing the tools of the developers"
	@$(call INSTALL,-e '$(DEV_EXTRAS)')
	@touch $@

demo: setup ## the main job: learns, loses three processes on purpose, heals
	$(BIN)/rota demo

# Whose types are checked: by a quick check those of the strict parts (pyproject.toml), by make test all.
TYPES = $(shell sed -n 's/^strict = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",')

# The fast tests in four parts side by side with lint: torch is imported by one process and the web stack by two, which
# take the files of one half of the alphabet each: workers of pytest-xdist would both import all of them, beside a third
# process. None imports what is wholly real. Some tests wait for sockets and processes: the other parts fill two cores. The
# plugin of schemathesis takes half a second to import and serves a slow test alone; those of valkey and anyio, a quarter,
# serve none. Two threads of torch wait for each other where two cores are shared.
FAST = OMP_NUM_THREADS=1 $(BIN)/pytest -q -p no:schemathesis -p no:valkey -p no:anyio --ignore-glob='*_real.py' -m "not real and not slow and not gpu"
TORCH := tests/examples tests/job tests/train
WEB := tests/service tests/ui
WEB_1 := $(wildcard tests/service/test_[a-j]*.py)

check: $(VENV)/.setup-dev ## lint, types of the strict parts, imports, fast tests: before every commit
	@$(MAKE) -kj5 -Otarget --no-print-directory types fast-rest fast-web fast-web-2 fast-torch style contracts TYPES="$(TYPES)"
fast-torch:
	@$(FAST) $(TORCH)
fast-web:
	@$(FAST) $(WEB_1)
fast-web-2:
	@$(FAST) $(addprefix --ignore=,$(WEB_1)) $(WEB)
fast-rest:
	@$(FAST) $(addprefix --ignore=,$(TORCH) $(WEB) tests/real)

lint: style contracts types ## lint, imports, types of the strict parts; TYPES=src/rota for all
style: $(VENV)/.setup-dev
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check -q src tests benchmarks examples
contracts: $(VENV)/.setup-dev
	$(BIN)/lint-imports --no-logo
types: $(VENV)/.setup-dev
	@$(BIN)/pyright --outputjson $(TYPES) > $(VENV)/pyright.json || \
	  { $(BIN)/python tests/show_pyright.py $(VENV)/pyright.json; exit 1; }

test: TYPES = src/rota
test: check real ## make check with the types of all, then real

real: $(VENV)/.setup-dev ## the slow half: real Ray, registry, processes and their deaths
	$(BIN)/pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m "(real or slow) and not gpu"

deep: $(VENV)/.setup-dev ## the slow half at length, an hour and more
	ROTA_DEEP=1 $(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder --timeout 1800 -m "(real or slow) and not gpu"

machines: $(VENV)/.setup-dev ## jobs over several machines, made of network namespaces on this one; needs root
	ROTA_MACHINES=1 $(BIN)/pytest -q tests/machines

SEEDS ?= 1000
sim: $(VENV)/.setup-dev ## thousands of seeds of the whole system in virtual time; SEED=n replays one, LOG=sql runs over SQLite, on all cores or JOBS=n
	$(BIN)/python -m tests.world $(if $(SEED),--seed $(SEED),--seeds $(SEEDS)) $(if $(LOG),--log $(LOG)) $(if $(JOBS),--jobs $(JOBS))

mutants: $(VENV)/.setup-dev ## break 300 sampled lines one at a time; which of them no unit test finds. MUTANTS="--seed 2 --area job"
	$(BIN)/python -m tests.mutants $(MUTANTS)

bench: $(VENV)/.setup-dev ## one script a claim, beside its named peer, and one table at the end; ONLY="tensors calls"
	@$(BIN)/python benchmarks/run.py $(ONLY)

ui: ## build the web UI from web/ into the package, after its own tests; needs Node 20 or newer
	cd web && npm ci && npm test && npm run build

ui-test: $(VENV)/.setup-dev web/node_modules ## the page in a real Chromium: forty steps, every page at four widths, light and dark
	ROTA_DEEP=1 $(BIN)/pytest -q tests/ui
web/node_modules: web/package-lock.json
	cd web && npm ci
	@touch $@

docs: $(VENV)/.setup-dev ## write what is generated in docs/ and README.md
	$(BIN)/python docs/generate.py

clean: ## remove what make made
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
