"""Adapters in real SGLang engines, in the environment of `make test-sglang`."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from engine_testing.adapters import check_adapter_updates
from engine_testing.shared_engine import build
from hf_engine import LoraConfig
from hf_engine.testing import LocalRanks, write_tiny_model
from hf_protocols import GenerationSpec, ParallelSpec, Topology

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
ATTENTION_AND_ONE_MORE = ("q_proj", "k_proj", "v_proj", "layers.1.mlp.down_proj")


def follow(directory, lora):
    size = dist.get_world_size()
    topology = Topology(ParallelSpec(dp_size=size), GenerationSpec(gen_tp_size=size))
    check_adapter_updates(
        lambda: build(directory, topology, lora=lora, start_timeout_s=600), directory, topology=topology, lora=lora
    )


@pytest.mark.sglang
@pytest.mark.timeout(1300)
@pytest.mark.parametrize(("family", "num_ranks", "targets"), [("llama", 1, ATTENTION_AND_ONE_MORE), ("qwen2", 2, None)])
def test_adapters_alone_follow_the_training(tmp_path, family, num_ranks, targets):
    directory = write_tiny_model(tmp_path / "model", family=family, tie_embeddings=num_ranks == 1, **HEADS)
    with LocalRanks(num_ranks, timeout_s=650) as ranks:
        ranks.run(follow, directory, LoraConfig(rank=3, alpha=6.0, targets=targets), deadline_s=1200)
