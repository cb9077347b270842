"""SGLang's own loaders without an engine: an update of every tensor ends where a load of the files does.

Experts are wrong on a CPU when they run; which names and shapes they have is known without.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_testing.engine_families import write_engine_family
from hf_engine.cpu_support.sglang_plugins import PLATFORM
from hf_engine.model_directory import read_model_directory
from hf_engine.models.conversions import buffers_in_files, read_file_names
from hf_engine.models.stacked_experts import tensors_in_files
from hf_engine.resharding.boxes import Box
from hf_engine.rollout.engine_rules import check_sglang_runs
from hf_engine.rollout.shard import ShardTensor
from hf_engine.testing import TINY_FAMILIES, LocalRanks
from hf_protocols import BackendError

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]

REFUSED = ("bloom", "falcon", "llama4_text", "phi", "phimoe")
"""Families that the rules for SGLang do not admit."""


@pytest.fixture(scope="module")
def alone() -> Iterator[LocalRanks]:
    with LocalRanks(1, timeout_s=120) as ranks:
        yield ranks


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_an_update_ends_where_a_load_does(alone, tmp_path, family):
    model, other = (write_engine_family(tmp_path / f"seed {seed}", family, seed=seed) for seed in (0, 3))
    refusal = None
    try:
        check_sglang_runs(read_model_directory(model), on_cpu=False, max_positions=1)
    except BackendError as error:
        refusal = str(error)
    assert refusal is None or family in REFUSED, refusal
    if refusal is not None:
        pytest.skip(refusal)
    alone.run(compare, model, other, deadline_s=600)


def compare(model, other):
    """The second model's tensors, in four parts, into SGLang's model of the first."""
    updated, loaded = load(model), load(other)
    shards = {
        name: ShardTensor(name, part.shape, Box.whole(tuple(part.shape)), part) for name, part in tensors_of(other)
    }
    names = list(shards)
    size = -(-len(names) // 4)
    with torch.no_grad():
        for start in range(0, len(names), size):
            updated.load_weights((name, shards[name]) for name in names[start : start + size])
    assert not [name for name, shard in shards.items() if not shard.is_used]
    found, wanted = ({**dict(each.named_parameters()), **dict(each.named_buffers())} for each in (updated, loaded))
    assert found.keys() == wanted.keys()
    assert not [name for name in wanted if not torch.equal(found[name], wanted[name])]


def tensors_of(model):
    source = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    parameters = {name: parameter.detach() for name, parameter in source.named_parameters()}
    return {**tensors_in_files(read_file_names(source), parameters), **buffers_in_files(source)}.items()


def load(path: Path) -> torch.nn.Module:
    """SGLang's model, as its scheduler loads it."""
    os.environ["SGLANG_PLATFORM"] = PLATFORM
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import init_dp_gathered_buffer, initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_loader import get_model
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    # Of attention only the name matters: some families want one that a CPU does not have.
    on_cpu = {"device": "cpu", "attention_backend": "triton", "disable_cuda_graph": True}
    arguments = ServerArgs(model_path=str(path), dtype="float32", skip_tokenizer_init=True, **on_cpu)
    publish(arguments, role="weight_cache_daemon", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    model = ModelConfig(model_path=str(path), dtype="float32")
    if not parallel_state.model_parallel_is_initialized():
        initialize_moe_config()
        parallel_state.init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo")
        parallel_state.initialize_model_parallel()
        initialize_dp_attention(arguments)
    init_dp_gathered_buffer(model)
    return get_model(
        model_config=model, load_config=LoadConfig(load_format="safetensors"), device_config=DeviceConfig("cpu")
    )
