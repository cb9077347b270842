from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_engine import TrainConfig, load_train_backend
from hf_engine.testing import LocalRanks, check_train_backend, write_tiny_model
from hf_protocols import ParallelSpec, Topology

VOCAB_SIZE = 70  # padded to 128 rows: ranks hold 64 and 6 real ones
CONFIG = TrainConfig(learning_rate=1e-2, micro_batch_tokens=40)
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB_SIZE}


def topology_of(sizes, order="megatron"):
    return Topology(ParallelSpec.parse(sizes), order=order)


def build(directory, sizes="1-1-1", config=CONFIG, order="megatron", **options):
    return load_train_backend("megatron").build(directory, topology=topology_of(sizes, order), config=config, **options)


def load_reference(directory, head="lm"):
    """The model in one process, float32; for a value head with a zero output layer."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    if head == "value":
        model.config.tie_word_embeddings = False
        model.set_output_embeddings(torch.nn.Linear(model.config.hidden_size, 1, bias=False))
        torch.nn.init.zeros_(model.get_output_embeddings().weight)
    return model


@pytest.fixture(scope="session")
def ranks4():
    with LocalRanks(4, timeout_s=60) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "tied": write_tiny_model(folder / "tied", **SIZES),
        "untied": write_tiny_model(folder / "untied", tie_embeddings=False, **SIZES),
        "qwen2": write_tiny_model(folder / "qwen2", family="qwen2", num_hidden_layers=3, **SIZES | {"seed": 3}),
    }


def conformance(model, directory, sizes, head, order="megatron", num_rows=5):
    topology = topology_of(sizes, order)
    check_train_backend(
        lambda config: build(model, sizes, config, order, head=head),
        load_reference(model, head),
        topology=topology,
        vocab_size=VOCAB_SIZE,
        directory=Path(directory),
        head=head,
        num_rows=num_rows,
    )


def test_one_rank_conforms(ranks1, models, tmp_path):
    ranks1.run(conformance, models["untied"], tmp_path, "1-1-1", "lm")


@pytest.mark.parametrize(
    ("sizes", "model", "head"),
    [
        ("1-1-2", "tied", "lm"),
        ("1-2-1", "tied", "lm"),
        ("2-1-1", "tied", "lm"),
        ("2-1-1", "qwen2", "value"),
        pytest.param("1-1-2", "qwen2", "value", marks=pytest.mark.slow),
        pytest.param("1-2-1", "untied", "value", marks=pytest.mark.slow),
        pytest.param("1-2-1", "qwen2", "lm", marks=pytest.mark.slow),
        pytest.param("2-1-1", "untied", "lm", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_conform(ranks2, models, tmp_path, sizes, model, head):
    ranks2.run(conformance, models[model], tmp_path, sizes, head)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "model", "head", "order"),
    [
        ("2-2-1", "tied", "lm", "megatron"),
        ("1-2-2", "qwen2", "lm", "megatron"),
        ("2-1-2", "tied", "lm", "megatron"),
        ("2-1-2", "untied", "value", "contiguous"),
    ],
)
def test_four_ranks_conform(ranks4, models, tmp_path, sizes, model, head, order):
    ranks4.run(conformance, models[model], tmp_path, sizes, head, order, deadline_s=300)
