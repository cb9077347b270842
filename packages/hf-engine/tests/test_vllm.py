"""Real vLLM engines, in the environment of `make test-vllm`; without it only what needs no vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_engine import SamplingParams, load_rollout_backend
from hf_engine.testing import LocalRanks, check_rollout_backend, write_tiny_model
from hf_protocols import GenerationSpec, ParallelSpec, Topology

VOCAB_SIZE, MAX_POSITIONS = 64, 48
CACHE_BYTES = 16 << 20
GREEDY = SamplingParams(max_new_tokens=6, greedy=True)

with_vllm = [pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
    return {
        "tied": write_tiny_model(folder / "tied"),
        # More rows than a multiple of the padding, so that the last rank holds fewer.
        "untied": write_tiny_model(folder / "untied", tie_embeddings=False, vocab_size=70, **heads),
        "qwen2": write_tiny_model(folder / "qwen2", family="qwen2", **heads),
        "qwen3": write_tiny_model(folder / "qwen3", family="qwen3", **heads),
        "mistral": write_tiny_model(folder / "mistral", family="mistral", tie_embeddings=False),
        "stopping": write_tiny_model(folder / "stopping", eos_token_id=[7, 30]),
        "heads": write_tiny_model(folder / "heads", head_dim=48),
        "other": write_tiny_model(folder / "other", seed=1),
    }


@pytest.fixture(scope="module")
def alone() -> Iterator[LocalRanks]:
    with LocalRanks(1, timeout_s=60) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two() -> Iterator[LocalRanks]:
    with LocalRanks(2, timeout_s=60) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[LocalRanks]:
    with LocalRanks(4, timeout_s=120) as ranks:
        yield ranks


def build(model, topology, **options):
    return load_rollout_backend("vllm").build(model, topology=topology, **{"cache_bytes": CACHE_BYTES, **options})


def conform(model, topology):
    backends = []

    def start():
        backends.append(build(model, topology))
        return backends[0]

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    check_rollout_backend(start, reference, vocab_size=VOCAB_SIZE, max_positions=MAX_POSITIONS, topology=topology)
    backends[0].close()


class TestEngines:
    pytestmark = with_vllm

    @pytest.mark.parametrize("model", ["tied", "untied", "qwen2", "qwen3", "mistral"])
    def test_one_rank_conforms(self, alone, models, model):
        alone.run(conform, models[model], Topology(ParallelSpec(), GenerationSpec()), deadline_s=300)

    @pytest.mark.parametrize("model", ["tied", "untied", "qwen2"])
    def test_two_tensor_parallel_ranks_conform(self, two, models, model):
        """The tied model has one key-value head, which both ranks hold."""
        topology = Topology(ParallelSpec(dp_size=2), GenerationSpec(gen_tp_size=2))
        two.run(conform, models[model], topology, deadline_s=300)

    def test_two_replicas_conform(self, two, models):
        two.run(conform, models["tied"], Topology(ParallelSpec(dp_size=2), GenerationSpec()), deadline_s=300)

    def test_strided_replicas_conform(self, four, models):
        """The paper's grouping: vLLM would take the ranks 0, 1 and 2, 3."""
        topology = Topology(ParallelSpec(tp_size=4), GenerationSpec(gen_tp_size=2))
        assert topology.groups("gen_tp") == ((0, 2), (1, 3))
        four.run(conform, models["untied"], topology, deadline_s=380)
