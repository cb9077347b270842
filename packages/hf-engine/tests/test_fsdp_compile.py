"""Compiled layers compute what the plain ones compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hf_engine import TrainConfig, load_train_backend
from hf_engine.testing import LocalRanks, check_train_backend, write_tiny_model
from hf_protocols import BackendError, ParallelSpec, Topology

CONFIG = TrainConfig(learning_rate=1e-2, micro_batch_tokens=40, shard="layer")


def build(model, config):
    topology = Topology(ParallelSpec(dp_size=dist.get_world_size()))
    return load_train_backend("fsdp").build(model, topology=topology, config=config), topology


def conform_compiled(model, directory, activation_checkpointing):
    """The conformance suite, which compares with transformers in one process within 1e-4; what was compiled for it."""
    changes = {"shard": "layer", "compile": True, "activation_checkpointing": activation_checkpointing}
    check_train_backend(
        lambda config: build(model, replace(config, **changes))[0],
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(),
        topology=Topology(ParallelSpec(dp_size=dist.get_world_size())),
        vocab_size=64,
        directory=Path(directory),
    )
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_compiled_layers_conform(tmp_path, activation_checkpointing):
    model = write_tiny_model(tmp_path / "model")
    with LocalRanks(2, timeout_s=300) as ranks:
        graphs = ranks.run(conform_compiled, model, tmp_path, activation_checkpointing, deadline_s=600)
    assert min(graphs) > 1, "the layers were not compiled"


def build_without_a_compiler(model, missing):
    # torch reads CXX when it is imported, which on a rank is over.
    compiler = torch._inductor.config.patch("cpp.cxx", (None, missing))
    message = r"compile=True needs .* Install a C\+\+ compiler .* set compile=False"
    with compiler, pytest.raises(BackendError, match=message):
        build(model, replace(CONFIG, compile=True))
    build(model, CONFIG)[0].close()


@pytest.mark.slow
def test_a_missing_compiler_is_one_clear_error(monkeypatch, tmp_path):
    model = write_tiny_model(tmp_path / "model")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    with LocalRanks(1) as ranks:
        ranks.run(build_without_a_compiler, model, str(tmp_path / "no-such-compiler"))
