from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from hf_engine.backends._replica import replica_of_all
from hf_engine.resharding.agreement import relayed
from hf_engine.resharding.boxes import Box
from hf_engine.resharding.execute import ReshardExecutor
from hf_engine.resharding.layouts import WeightLayout, fsdp_layout
from hf_engine.resharding.model_layouts import generation_layout, model_shapes
from hf_engine.resharding.plan import plan_reshard
from hf_engine.resharding.streaming import ShardStream, group_parameters
from hf_engine.testing import LocalRanks
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
    """Values that tell parameters, places and steps apart."""
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
        assert stream.run(cut(source, rank, step), groups.append, version=step) == plan.recv_bytes[rank]
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
        stream.run(incomplete, lambda shards: None, version=3)


def take_nothing_on_rank_1(refused):
    """Rank 1's engine refuses a group: both know before the next one moves."""
    rank = dist.get_rank()
    source = fsdp_layout(model_shapes(MODEL), range(2))
    plan = plan_reshard(source, generation_layout(MODEL, Topology(ParallelSpec(dp_size=2), GenerationSpec())))
    stream, taken = ShardStream(plan, bucket_bytes=2048), []

    def take(shards):
        if rank == 1 and len(taken) == refused % len(stream._groups):
            raise OSError("the engine is full")
        taken.append(shards)

    error, message = (OSError, "full") if rank else (ReshardError, "rank 1 refused: OSError: the engine is full")
    with pytest.raises(error, match=message):
        stream.run(cut(source, rank, 0), take, version=1)
    return len(taken)


def test_what_one_rank_does_not_take_is_an_error_on_all(ranks2):
    assert ranks2.run(take_nothing_on_rank_1, 0) == [1, 0]
    last, taken = ranks2.run(take_nothing_on_rank_1, -1)
    assert last == taken + 1


def refuse_where_only_some_groups_move(refused):
    """Some parameters are where generation wants them already: in a later run nobody is asked about these."""
    rank = dist.get_rank()
    shapes = {f"{kind}.{index}": (4, 2) for index in range(2) for kind in ("moves", "stays")}
    halves = [(Box((0, 0), (2, 2)),), (Box((2, 0), (2, 2)),)]
    source = WeightLayout(shapes=shapes, boxes={r: dict.fromkeys(shapes, halves[r]) for r in range(2)})
    target = WeightLayout(
        shapes=shapes,
        boxes={r: {name: halves[r if "stays" in name else 1 - r] for name in shapes} for r in range(2)},
    )
    stream = ShardStream(plan_reshard(source, target), bucket_bytes=16)
    assert [len(names) for names in stream._groups] == [1, 1, 1, 1]
    stream.run(cut(source, rank, 0), lambda shards: None, version=1)

    def take(shards):
        if rank == 1 and refused in shards:
            raise OSError("the engine is full")

    error, message = (OSError, "full") if rank else (ReshardError, "rank 1 refused: OSError: the engine is full")
    with pytest.raises(error, match=message):
        stream.run(cut(source, rank, 1), take, version=2)
    stream.run(cut(source, rank, 2), lambda shards: None, version=3)


@pytest.mark.parametrize("refused", ["stays.0", "moves.0", "stays.1", "moves.1"])
def test_a_refusal_beside_groups_that_do_not_move_is_an_error_on_all(ranks2, refused):
    ranks2.run(refuse_where_only_some_groups_move, refused)


def fail_beside_an_engine_that_all_feed(place):
    """Ranks meet where they hand over: one that has nothing to hand over must not stay away, nor wait elsewhere."""
    rank, replica = dist.get_rank(), replica_of_all()
    shapes = {f"{kind}.{index}": (4, 2) for index in range(2) for kind in ("stays", "moves")}
    halves = [(Box((0, 0), (2, 2)),), (Box((2, 0), (2, 2)),)]
    source = WeightLayout(shapes=shapes, boxes={r: dict.fromkeys(shapes, halves[r]) for r in range(2)})
    boxes = {r: {name: halves[r if "stays" in name else 1 - r] for name in shapes} for r in range(2)}
    stream = ShardStream(plan_reshard(source, WeightLayout(shapes=shapes, boxes=boxes)), bucket_bytes=16)

    def take(shards):
        if len({*replica.gather(tuple(shards))}) > 1:
            raise relayed(ReshardError("the ranks hand over different parameters"), {})

    def allocate(names, target, real=stream._allocate):
        if place in names:
            raise MemoryError("full")
        real(names, target)

    full = MemoryError("full")
    stream.run(cut(source, rank, 0), take, version=1)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(stream, "_allocate", allocate)
        told = "^full$" if rank else "^rank 1 refused: MemoryError: full; "
        with pytest.raises((ReshardError, MemoryError), match=told):
            stream.run(cut(source, rank, 1), take, version=2, refusal=full if rank and place == "before" else None)
    stream.run(cut(source, rank, 2), take, version=3)
    replica.close()


@pytest.mark.parametrize("place", ["before", "stays.0", "moves.0", "stays.1", "moves.1"])
def test_a_rank_without_shards_leaves_none_waiting_where_all_hand_over(ranks2, place):
    ranks2.run(fail_beside_an_engine_that_all_feed, place, deadline_s=30)


def refuse_the_last_group_of_the_first_run():
    """The first group does not move, and nobody asks with it any more when the last was refused."""
    rank = dist.get_rank()
    shapes = {"stays": (4, 2), "moves": (4, 2)}
    halves = [(Box((0, 0), (2, 2)),), (Box((2, 0), (2, 2)),)]
    source = WeightLayout(shapes=shapes, boxes={r: dict.fromkeys(shapes, halves[r]) for r in range(2)})
    boxes = {r: {"stays": halves[r], "moves": halves[1 - r]} for r in range(2)}
    stream = ShardStream(plan_reshard(source, WeightLayout(shapes=shapes, boxes=boxes)), bucket_bytes=16)

    def take(shards):
        if rank == 1 and "moves" in shards:
            raise OSError("the engine is full")

    error, message = (OSError, "full") if rank else (ReshardError, "rank 1 refused: OSError: the engine is full")
    with pytest.raises(error, match=message):
        stream.run(cut(source, rank, 0), take, version=1)


def test_a_refusal_of_the_first_run_is_an_error_on_all(ranks2):
    ranks2.run(refuse_the_last_group_of_the_first_run)


@pytest.mark.parametrize("bucket_bytes", [64, 2048, 1 << 20])
@pytest.mark.parametrize("gen_tp_size", [1, 2])
def test_every_shard_arrives_within_the_bound(ranks2, gen_tp_size, bucket_bytes):
    ranks2.run(stream_shards, gen_tp_size, bucket_bytes)


def test_groups_follow_the_order_and_respect_the_bound():
    layout = fsdp_layout({"a": (4, 2), "b": (2, 2), "c": (40, 2), "d": (2,), "e": (2,)}, range(2))
    assert group_parameters(layout, 24) == [("a", "b"), ("c",), ("d", "e")]
    assert group_parameters(layout, 1) == [("a",), ("b",), ("c",), ("d",), ("e",)]
    assert group_parameters(layout, 1 << 20) == [("a", "b", "c", "d", "e")]


def die_with_the_last_group():
    """Rank 1 has everything, and is gone when both are asked whether they took it."""
    rank = dist.get_rank()
    source = fsdp_layout(model_shapes(MODEL), range(2))
    plan = plan_reshard(source, generation_layout(MODEL, Topology(ParallelSpec(dp_size=2), GenerationSpec())))
    stream, taken = ShardStream(plan, bucket_bytes=2048), []

    def take(shards):
        taken.append(shards)
        if rank == 1 and len(taken) == len(stream._groups):
            os._exit(1)

    with pytest.raises(ReshardError, match="transfer of weights lost another rank on rank 0"):
        stream.run(cut(source, rank, 0), take, version=0)
    raise AssertionError("the survivor knows")


def test_a_rank_that_dies_with_the_last_group_is_a_typed_error():
    with LocalRanks(2, timeout_s=20) as ranks, pytest.raises(RuntimeError, match="the survivor knows"):
        ranks.run(die_with_the_last_group)


def fail_in_what_stays():
    """Rank 1 cannot copy what moves to nobody, of the second of three groups; both hear of it with the third."""
    rank, shapes = dist.get_rank(), {"a": (8,), "b": (8,), "c": (8,)}
    all_rows = {name: (Box.whole(shape),) for name, shape in shapes.items()}
    source = WeightLayout(shapes=shapes, boxes={0: all_rows, 1: {"b": all_rows["b"]}})
    target = WeightLayout(shapes=shapes, boxes={0: all_rows, 1: all_rows})
    stream = ShardStream(plan_reshard(source, target), bucket_bytes=16)
    assert stream._groups == [("a",), ("b",), ("c",)]

    def run(self, *args, real=ReshardExecutor._exchange, **options):
        if rank == 1 and not self.has_rounds:
            raise MemoryError("no room for the copy")
        return real(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReshardExecutor, "_exchange", run)
        with pytest.raises((MemoryError, ReshardError)) as failed:
            stream.run(cut(source, rank, 0), lambda shards: None, version=0)
    stream.run(cut(source, rank, 0), lambda shards: None, version=0)
    return str(failed.value)


def test_a_failure_in_what_stays_is_told_with_what_moves_next(ranks2):
    """In the first run, too, when the ranks do not know yet that they have one plan."""
    told = "rank 1 refused: MemoryError: no room for the copy; the other ranks moved no weights"
    assert ranks2.run(fail_in_what_stays) == [told, "no room for the copy"]
