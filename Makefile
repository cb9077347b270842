# Every target sets up what it needs; a second set-up does nothing.
.DEFAULT_GOAL := help
SHELL := bash
BIN := .venv/bin

# Tests and checks neither look for models on a hub nor report usage.
export HF_HUB_OFFLINE ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0
# An engine's environment is compiled by its first import.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help env quickstart test test-slow test-vllm test-sglang test-matrix check fmt docs bench bench-gpu wheels constraints clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: ## set up .venv, as every other target does first
	@scripts/env.sh

quickstart: env ## train a small model with PPO on this machine and leave a report in runs/quickstart
	$(BIN)/hybridflow quickstart

test: env ## run the tests of the base environment
	$(BIN)/pytest

test-slow: env ## run the tests that take minutes or many processes
	$(BIN)/pytest packages -m "slow and not gpu and not vllm and not sglang" --timeout 900
	$(BIN)/pytest integration-tests -m "slow and not gpu and not vllm and not sglang" --timeout 900

test-vllm: env ## set up .venv-vllm and test the vLLM backend with a real engine
	scripts/env.sh vllm
	.venv-vllm/bin/pytest packages/hf-engine/tests/test_vllm.py packages/hf-engine/tests/test_server.py \
		packages/hf-engine/tests/test_rollout_dtype.py packages/hf-engine/tests/test_matrix.py \
		integration-tests/tests/test_engine_run.py integration-tests/tests/test_server_run.py -m "vllm and not slow"
	.venv-vllm/bin/pytest integration-tests/tests/test_swap_page.py -m vllm

test-sglang: env ## set up .venv-sglang and test the SGLang backend with real engines
	scripts/env.sh sglang
	.venv-sglang/bin/pytest packages/hf-engine/tests/test_sglang.py packages/hf-engine/tests/test_server.py \
		packages/hf-engine/tests/test_rollout_dtype.py packages/hf-engine/tests/test_matrix.py \
		integration-tests/tests/test_engine_run.py integration-tests/tests/test_server_run.py -m "sglang and not slow"
	.venv-sglang/bin/pytest integration-tests/tests/test_swap_page.py -m sglang

test-matrix: env ## test every training layout with every engine, and keep the dated result
	scripts/env.sh vllm
	scripts/env.sh sglang
	$(BIN)/python benchmarks/matrix.py

check: env ## lint, format, types, import contracts and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --cache-dir .cache/import-linter
	$(BIN)/codespell

fmt: env ## format, and repair what the linter can
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .

docs: env ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: env ## run every benchmark; results go to benchmarks/results; fails where one misses a target
	@failed=; for file in benchmarks/bench_*.py; do echo "$$file"; $(BIN)/python "$$file" || failed+=" $$file"; done; \
		test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

bench-gpu: env ## measure the transition of a 7B model on one GPU
	$(BIN)/python benchmarks/gpu_transition.py

wheels: env ## build each package's wheel and prove that it works when installed alone
	source scripts/registry.sh && $(BIN)/python scripts/check_wheels.py

constraints: env ## pin again after a dependency changed
	source scripts/registry.sh && scripts/pin.sh

clean: ## remove everything that was built, cached or installed here; runs/ stays
	rm -rf .venv .venv-* .bootstrap .cache .hypothesis site dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
