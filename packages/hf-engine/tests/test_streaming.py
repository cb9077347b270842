from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hf_engine.resharding.boxes import Box
from hf_engine.resharding.layouts import fsdp_layout
from hf_engine.resharding.model_layouts import generation_layout, model_shapes
from hf_engine.resharding.plan import plan_reshard
from hf_engine.resharding.streaming import ShardStream, group_parameters
from hf_protocols import GenerationSpec, ModelShape, ParallelSpec, ReshardError, Topology

MODEL = ModelShape(
    name="tiny",
    num_layers=2,
    hidden_size=8,
    intermediate_size=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    vocab_size=70,
    qkv_bias=True,
)


def whole(name, shape, step):
    """Values that differ by parameter, place and step."""
    seed = sum(map(ord, name))
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + 1000 * seed + step


def cut(layout, rank, step):
    shapes = layout.shapes
    return {
        name: [whole(name, shapes[name], step)[box.slices_in(Box.whole(shapes[name]))].clone() for box in boxes]
        for name, boxes in layout.boxes_of(rank).items()
    }


def stream_shards(gen_tp_size, bucket_bytes):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    source = fsdp_layout(model_shapes(MODEL), range(world_size))
    topology = Topology(ParallelSpec(dp_size=world_size), GenerationSpec(gen_tp_size=gen_tp_size))
    target = generation_layout(MODEL, topology)
    plan = plan_reshard(source, target)
    stream = ShardStream(plan, bucket_bytes=bucket_bytes)
    staging = stream.staging_bytes
    for step in range(2):
        groups = []
        received = stream.exchange(stream.check(cut(source, rank, step)), groups.append, version=step)
        assert received == plan.recv_bytes[rank]
        expected = cut(target, rank, step)
        assert [name for shards in groups for name in shards] == list(expected) == list(target.shapes)
        for shards in groups:
            for name, parts in shards.items():
                assert all(torch.equal(part, wanted) for part, wanted in zip(parts, expected[name], strict=True)), name
            size = sum(part.nbytes for parts in shards.values() for part in parts)
            assert size <= bucket_bytes or len(shards) == 1
        assert stream.staging_bytes == staging
    incomplete = cut(source, rank, 0)
    del incomplete["model.norm.weight"]
    with pytest.raises(ReshardError, match=r"missing \['model.norm.weight'\]"):
        stream.check(incomplete)


@pytest.mark.parametrize("bucket_bytes", [64, 2048, 1 << 20])
@pytest.mark.parametrize("gen_tp_size", [1, 2])
def test_every_shard_arrives_within_the_bound(ranks2, gen_tp_size, bucket_bytes):
    ranks2.run(stream_shards, gen_tp_size, bucket_bytes)


def test_groups_follow_the_order_and_respect_the_bound():
    layout = fsdp_layout({"a": (4, 2), "b": (2, 2), "c": (40, 2), "d": (2,), "e": (2,)}, range(2))
    assert group_parameters(layout, 24) == [("a", "b"), ("c",), ("d", "e")]
    assert group_parameters(layout, 1) == [("a",), ("b",), ("c",), ("d",), ("e",)]
    assert group_parameters(layout, 1 << 20) == [("a", "b", "c", "d", "e")]
