"""The fsdp backend with architectures that are not Llama, against transformers in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, GemmaConfig, GPT2Config

from hf_engine import TrainConfig, load_train_backend
from hf_engine.testing import check_train_backend, write_tiny_model
from hf_protocols import ParallelSpec, Topology

VOCAB_SIZE = 64


def gpt2(directory):
    """Absolute positions, fused projections, dropout in its configuration."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB_SIZE, n_embd=64, n_layer=2, n_head=2, n_positions=48, initializer_range=0.2)
    config.bos_token_id = config.eos_token_id = None
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def gemma(directory):
    """Tied embeddings that are scaled, norms around 1, gelu."""
    torch.manual_seed(0)
    config = GemmaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=48,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def mixtral(directory):
    """Experts that transformers stacks: two ranks hold two each."""
    return write_tiny_model(directory, family="mixtral", vocab_size=VOCAB_SIZE)


MODELS = {
    # Softmax does not see the keys' bias: its gradient is rounding noise, which a larger eps keeps small.
    "gpt2": (gpt2, TrainConfig(learning_rate=1e-2, eps=1e-3, activation_checkpointing=True, shard="layer")),
    "gemma": (gemma, TrainConfig(learning_rate=3e-3, eps=1e-6, weight_decay=0.01, max_grad_norm=0.5, shard="layer")),
    # Experts that few tokens reach have gradients near zero, whose rounding a larger eps keeps small, too.
    "mixtral": (mixtral, TrainConfig(learning_rate=3e-3, eps=1e-5, weight_decay=0.01, shard="layer")),
}


def conformance(model, directory, config):
    topology = Topology(ParallelSpec(dp_size=dist.get_world_size()))
    check_train_backend(
        lambda config: load_train_backend("fsdp").build(model, topology=topology, config=config),
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(),
        topology=topology,
        vocab_size=VOCAB_SIZE,
        directory=Path(directory),
        config=replace(config, micro_batch_tokens=64),
    )


# `make test-families` holds every family to transformers; tied embeddings are also in test_fsdp.py.
@pytest.mark.parametrize(
    "name", [pytest.param("gpt2", marks=pytest.mark.slow), pytest.param("gemma", marks=pytest.mark.matrix), "mixtral"]
)
def test_another_architecture_conforms(ranks2, tmp_path, name):
    write, config = MODELS[name]
    ranks2.run(conformance, write(tmp_path / "model"), tmp_path, config)


def test_an_eps_that_blows_up_rounding_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.eps=1e-08: check_train_backend needs at least 1e-06"):
        check_train_backend(
            None,
            None,
            topology=Topology(ParallelSpec(dp_size=1)),
            vocab_size=VOCAB_SIZE,
            directory=tmp_path,
            config=TrainConfig(learning_rate=3e-3),
        )
