# Every target sets up what it needs; a second set-up does nothing.
.DEFAULT_GOAL := help
SHELL := bash
BIN := .venv/bin

# Tests and checks neither look for models on a hub nor report usage.
export HF_HUB_OFFLINE ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0
# An engine's environment is compiled by its first import.
unexport PYTHONDONTWRITEBYTECODE

# Four parts are tested at a time, the longest first: clusters and ranks wait now and then, and two cores stay busy.
PARTS := hf-engine-a-l hf-engine-m-z integration-g-z integration-a-f hf-controller hf-algorithms hf-mapper hf-protocols
# The two largest by the first letter of their files: in one process each they would end last, alone.
integration-a-f := $(wildcard integration-tests/tests/test_[a-f]*.py)
integration-g-z := $(filter-out $(integration-a-f),$(wildcard integration-tests/tests/test_*.py))
hf-engine-a-l := $(wildcard packages/hf-engine/tests/test_[a-l]*.py)
hf-engine-m-z := $(filter-out $(hf-engine-a-l),$(wildcard packages/hf-engine/tests/test_*.py))
SLOW_PARTS := learning integration-tests hf-controller hf-engine hf-mapper
# Runs that learn compute for minutes: a part of their own in the slow lane, next to those that wait for clusters.
LEARNING := integration-tests/tests/test_quickstart.py integration-tests/tests/test_gsm8k_page.py

.PHONY: help env quickstart test test-slow $(PARTS:%=test-%) $(SLOW_PARTS:%=test-%) test-vllm test-sglang test-trackers fuzz soak test-failures test-matrix test-families
.PHONY: check fmt docs api
.PHONY: bench bench-learning bench-gsm8k bench-gpu wheels constraints clean

ENGINES := packages/hf-engine/tests/test_server.py packages/hf-engine/tests/test_rollout_dtype.py \
	packages/hf-engine/tests/test_matrix.py packages/hf-engine/tests/test_replica_failures.py \
	integration-tests/tests/test_engine_run.py integration-tests/tests/test_server_run.py
TRACKED := packages/hf-algorithms/tests/test_real_trackers.py integration-tests/tests/test_tracked_runs.py
FAILURES := packages/hf-controller/tests/test_failure_matrix.py packages/hf-controller/tests/test_ray_cluster_ends.py \
	packages/hf-engine/tests/test_torchrun_failures.py
LONG_BENCHMARKS := $(addprefix benchmarks/bench_,learning.py gsm8k.py end_to_end.py gpu.py dispatch_verl.py)
DURATIONS := --durations 20 --durations-min 5

# Every line of $(2) begins with its name, $(1); an interrupt ends the command, and the naming of lines when it is through.
named = set -o pipefail; { $(2); } 2>&1 | (trap '' INT; exec sed -u 's/^/$(1) | /')
engine-tests = scripts/env.sh $(1) && \
	.venv-$(1)/bin/pytest packages/hf-engine/tests/test_$(1)*.py $(ENGINES) -m "$(1) and not slow and not matrix" $(DURATIONS)

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: ## set up .venv, as every other target does first
	@scripts/env.sh

quickstart: env ## train a small model with PPO on this machine and leave a report in runs/quickstart
	$(BIN)/hybridflow quickstart

test: env ## run the tests of the base environment
	@$(MAKE) --no-print-directory --jobs 4 $(PARTS:%=test-%)

test-slow: env ## run the tests that take minutes or many processes
	@$(MAKE) --no-print-directory --jobs 2 $(SLOW_PARTS:%=test-%) \
		SELECT='-m "slow and not gpu and not vllm and not sglang and not matrix" --timeout 900 $(LEARNING:%=--ignore %)'

$(sort $(PARTS:%=test-%) test-hf-engine test-integration-tests): test-%: env # one package's tests, or those of all packages together
	@$(call named,$*,$(BIN)/pytest $(or $($*),$(wildcard packages/$* $*)) $(SELECT) $(DURATIONS))

test-learning: env
	@$(call named,learning,$(BIN)/pytest $(LEARNING) -m "slow and not matrix" --timeout 900 $(DURATIONS))

test-vllm: env ## set up .venv-vllm and test the vLLM backend with a real engine
	@$(call named,vllm,$(call engine-tests,vllm))

test-sglang: env ## set up .venv-sglang and test the SGLang backend with real engines
	@$(call named,sglang,$(call engine-tests,sglang))

test-trackers: ## set up .venv-trackers and test runs that TensorBoard, W&B, MLflow and Trackio follow
	@$(call named,trackers,scripts/env.sh trackers && .venv-trackers/bin/pytest $(TRACKED) -m trackers $(DURATIONS))

fuzz: env ## read 100,000 damaged files with every reader; INPUTS=N for others
	$(BIN)/python integration-tests/fuzz.py --inputs $(or $(INPUTS),100000)

soak: env ## strike runs with faults at random, resume them, and keep the dated results
	scripts/env.sh vllm
	$(BIN)/python benchmarks/soak.py --kind in_process --keep
	$(BIN)/python benchmarks/soak.py --kind ray --keep
	.venv-vllm/bin/python benchmarks/soak.py --kind server --keep

test-failures: env ## run the whole failure matrix, and keep how long each message took
	mkdir -p .cache && rm -f .cache/failures.jsonl
	HYBRIDFLOW_FAILURES=$(CURDIR)/.cache/failures.jsonl $(BIN)/pytest $(FAILURES) -m "failures or not failures" $(DURATIONS)
	$(BIN)/python benchmarks/failure_table.py .cache/failures.jsonl

test-matrix: env ## test every layout, the quickstart with every engine, and further variants of slow tests; keep the dated result
	scripts/env.sh vllm
	scripts/env.sh sglang
	$(BIN)/pytest integration-tests -m matrix --timeout 900 $(DURATIONS)
	$(BIN)/pytest packages/hf-engine -m "matrix and not vllm and not sglang" $(DURATIONS)
	$(BIN)/python benchmarks/matrix.py
	$(BIN)/python benchmarks/quickstart_gains.py
	.venv-sglang/bin/pytest packages/hf-engine/tests/test_sglang.py -m "sglang and slow"
	.venv-vllm/bin/pytest integration-tests/tests/test_swap_page.py -m vllm
	.venv-sglang/bin/pytest integration-tests/tests/test_swap_page.py -m sglang

test-families: env ## test every family of models against transformers and in the engines, and write the page of results
	scripts/env.sh vllm
	scripts/env.sh sglang
	$(BIN)/python scripts/families.py

check: env ## lint, format, types, import contracts, spelling and wording
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --cache-dir .cache/import-linter
	$(BIN)/codespell
	$(BIN)/python scripts/wording.py

fmt: env ## format, and repair what the linter can
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .

docs: env ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

api: env ## show how the public API differs from docs/reference/api.txt
	$(BIN)/python scripts/api_surface.py

bench: env ## run every benchmark; results go to benchmarks/results; fails where one misses a target
	@failed=; for file in $(filter-out $(LONG_BENCHMARKS),$(wildcard benchmarks/bench_*.py)); do echo "$$file"; $(BIN)/python "$$file" || failed+=" $$file"; done; \
		test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

bench-learning: env ## train every algorithm from one warm start; goes on where it stopped; at most 90 minutes
	$(BIN)/python benchmarks/bench_learning.py --write

bench-gsm8k: env ## run the page "Train on GSM8K" with three seeds; goes on where it stopped; needs ../shared/data/gsm8k
	$(BIN)/python benchmarks/bench_gsm8k.py --write

bench-gpu: env ## measure transition, training and GRPO on one GPU within 8 minutes
	$(BIN)/python benchmarks/bench_gpu.py

wheels: env ## build each package's wheel and prove that it works when installed alone
	source scripts/registry.sh && $(BIN)/python scripts/check_wheels.py

constraints: env ## pin again after a dependency changed
	source scripts/registry.sh && scripts/pin.sh

clean: ## remove everything that was built, cached or installed here; runs/ stays
	rm -rf .venv .venv-* .bootstrap .cache .hypothesis site dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
