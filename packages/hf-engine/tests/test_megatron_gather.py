from __future__ import annotations

import pytest
import torch

from engine_testing.traffic import count_traffic
from hf_engine import TrainConfig, load_train_backend
from hf_engine.testing import write_tiny_model
from hf_engine.training.megatron._gather import WeightGather
from hf_protocols import ParallelSpec, Topology


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {family: write_tiny_model(folder / family, family=family) for family in ("llama", "qwen3_moe")}


def gather_what_others_step(model, ep_size, dtype, max_bytes):
    """Every replica forgets what it does not step; the number of all-gathers."""
    topology = Topology(ParallelSpec(dp_size=2, ep_size=ep_size))
    backend = load_train_backend("megatron").build(
        model, topology=topology, config=TrainConfig(learning_rate=1e-2, dtype=dtype)
    )
    stage = backend._stage
    for parameter in stage.parameters.values():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    gather = WeightGather(stage.module, max_bytes=max_bytes)
    whole = {name: parameter.detach().clone() for name, parameter in stage.parameters.items()}
    for name, parameter in stage.parameters.items():
        shard, flat = stage.optimizer.shard(parameter), whole[name].view(-1)
        parameter.detach().fill_(torch.nan).view(-1)[shard.start : shard.stop] = flat[shard.start : shard.stop]
    assert any(parameter.isnan().any() for parameter in stage.parameters.values())
    with count_traffic() as traffic:
        gather.run()
    for name, parameter in stage.parameters.items():
        assert torch.equal(parameter, whole[name]), name
    parts = [buffer.numel // 2 for buffer in stage.module.buffers]
    if ep_size == 1:
        parts += [buffer.numel // 2 for buffer in stage.module.expert_parallel_buffers]
    backend.close()
    assert set(traffic.calls) == {"_allgather_base_"}
    return traffic.calls["_allgather_base_"], parts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "ep_size"), [("llama", 1), ("qwen3_moe", 1), ("qwen3_moe", 2)])
def test_replicas_give_each_other_what_they_step_some_at_a_time(ranks2, models, family, ep_size, dtype):
    """Experts that have no other replica are not gathered."""
    for width in (777, 1 << 20):
        max_bytes = 2 * width * getattr(torch, dtype).itemsize + 1
        for gathers, parts in ranks2.run(gather_what_others_step, models[family], ep_size, dtype, max_bytes):
            assert gathers == sum(-(-part // width) for part in parts)
