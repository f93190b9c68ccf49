# make run     check and measure every step found under stages/, print the ladder
# make test    run the tests
# make lab     open the lessons in Jupyter
# make bench   time the library and its peers, shape by shape, into results/library.json (needs a Hopper GPU)
# make docs    rewrite what is generated from docs/results: tables in the README and docs, plots
# make api     rewrite docs/api.md, the reference of the library, from its docstrings
# make lines   count the library's core: what runs on the GPU and what launches it
#
# Each target makes .venv when it is missing. PYTHON picks the interpreter (3.11 or 3.12); ARGS is passed on:
#   make run ARGS="--stage 01"     make test ARGS="tests/test_check.py -x"     make bench ARGS="--only 4096x"

PYTHON ?= $(shell for p in python3.12 python3.11 python3; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin

.PHONY: run test lab bench docs api lines
run: .venv/ready
	$(BIN)/hopperlab run $(ARGS)

test: .venv/ready
	$(BIN)/python -m pytest -n auto $(ARGS)

lab: .venv/ready
	$(BIN)/jupyter lab stages $(ARGS)

bench: .venv/ready
	$(BIN)/python -m fp8_gemm.bench results/library.json $(ARGS)

docs: .venv/ready
	$(BIN)/hopperlab report

api: .venv/ready
	$(BIN)/python docs/make_api.py

lines:
	@wc -l stages/06_moe_grouped/fp8_gemm/plan.py stages/06_moe_grouped/fp8_gemm/kernels/*

.venv/ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or 3.12 on the PATH. Install one, or name it: make PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv .venv || { echo "'$(PYTHON) -m venv' failed. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[course,test]'
	touch $@
