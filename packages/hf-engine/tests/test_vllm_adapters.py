"""Adapters in real vLLM engines, in the environment of `make test-vllm`."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from engine_testing.adapters import check_adapter_updates
from hf_engine import LoraConfig, load_rollout_backend
from hf_engine.testing import LocalRanks, write_tiny_model
from hf_protocols import GenerationSpec, ParallelSpec, Topology

LORA = LoraConfig(rank=3, alpha=6.0)
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}


def read_base(rollout):
    """The parameters of the layers below vLLM's adapters, as its kernels have them."""
    model = rollout._engine._worker.model_runner.get_model()
    return {name: parameter.data for name, parameter in model.named_parameters()}


def follow(directory, lora):
    size = dist.get_world_size()
    topology = Topology(ParallelSpec(dp_size=size), GenerationSpec(gen_tp_size=size))

    def build():
        options = {"cache_bytes": 16 << 20, "lora": lora}
        return load_rollout_backend("vllm").build(directory, topology=topology, **options)

    check_adapter_updates(build, directory, topology=topology, lora=lora, read_base=read_base)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "tied": write_tiny_model(folder / "tied", **HEADS),
        "qwen2": write_tiny_model(folder / "qwen2", family="qwen2", tie_embeddings=False, **HEADS),
        "mixtral": write_tiny_model(folder / "mixtral", family="mixtral"),
    }


@pytest.mark.vllm
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("model", "num_ranks", "lora"),
    [("tied", 1, LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "layers.1.mlp.down_proj"))), ("qwen2", 2, LORA)],
)
def test_adapters_alone_follow_the_training(models, model, num_ranks, lora):
    with LocalRanks(num_ranks, timeout_s=120) as ranks:
        ranks.run(follow, models[model], lora, deadline_s=300)
