from __future__ import annotations

import random
from itertools import product

import pytest
import torch
import torch.distributed as dist

from hf_engine.resharding.boxes import Box
from hf_engine.resharding.execute import ReshardExecutor, check_weights, execute_reshard
from hf_engine.resharding.layouts import WeightLayout, fsdp_layout, replicated_layout
from hf_engine.resharding.plan import plan_reshard
from hf_engine.testing import LocalRanks
from hf_engine.testing._weights import cut_weights, empty_weights, numbered_weights
from hf_protocols.errors import ReshardError

SHAPES = {"embed": (13, 4), "norm": (5,), "head": (1, 8), "scale": (), "experts": (3, 2, 5)}
SHARDED = {name: shape for name, shape in SHAPES.items() if shape}


def random_layout(rng, shapes, world_size, dtype="float32"):
    """Cuts every parameter at random and gives each piece to a random set of ranks."""
    boxes = {rank: {name: [] for name in shapes} for rank in range(world_size)}
    for name, shape in shapes.items():
        cuts = [sorted({0, n, *(rng.randint(0, n) for _ in range(2))}) for n in shape]
        for position in product(*(range(len(c) - 1) for c in cuts)):
            offset = tuple(c[p] for c, p in zip(cuts, position, strict=True))
            piece = Box(offset, tuple(c[p + 1] - c[p] for c, p in zip(cuts, position, strict=True)))
            for rank in rng.sample(range(world_size), rng.randint(1, world_size)):
                boxes[rank][name].append(piece)
    fixed = {rank: {name: tuple(pieces) for name, pieces in held.items()} for rank, held in boxes.items()}
    return WeightLayout(shapes=shapes, boxes=fixed, dtype=dtype)


def assert_same(tensors, expected):
    assert tensors.keys() == expected.keys()
    for name, parts in tensors.items():
        for part, wanted in zip(parts, expected[name], strict=True):
            assert torch.equal(part, wanted), name


def reshard_between_random_layouts(num_cases):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    full = numbered_weights(SHAPES)
    rng = random.Random(world_size)
    for _ in range(num_cases):
        source, target = (random_layout(rng, SHAPES, world_size) for _ in range(2))
        forth, back = plan_reshard(source, target), plan_reshard(target, source)
        bucket_bytes = rng.choice([16, 80, 4096])
        weights = empty_weights(target, rank)
        received = execute_reshard(forth, cut_weights(source, rank, full), weights, bucket_bytes=bucket_bytes)
        assert received == forth.recv_bytes[rank]
        assert_same(weights, cut_weights(target, rank, full))
        returned = empty_weights(source, rank)
        assert execute_reshard(back, weights, returned, bucket_bytes=bucket_bytes) == back.recv_bytes[rank]
        assert_same(returned, cut_weights(source, rank, full))


def gather_fsdp_shards(bucket_bytes):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    full = numbered_weights(SHARDED)
    source, target = fsdp_layout(SHARDED, range(world_size)), replicated_layout(SHARDED, range(world_size))
    plan = plan_reshard(source, target)
    executor = ReshardExecutor(plan, bucket_bytes=bucket_bytes)
    # Every message ends in a seal: two rounds in flight, at most one message to and from every peer.
    assert executor.buffer_bytes <= bucket_bytes + 4 * world_size * (4 + 24)
    shards = {name: parts[0] for name, parts in cut_weights(source, rank, full).items()}
    weights = {name: torch.zeros(shape) for name, shape in SHARDED.items()}
    for step in range(3):
        pointers = [tensor.data_ptr() for tensor in weights.values()]
        for tensor in (*shards.values(), *full.values()):
            tensor.add_(step)
        assert executor.run(shards, weights).recv_bytes == plan.recv_bytes[rank]
        assert [tensor.data_ptr() for tensor in weights.values()] == pointers
        for name, tensor in weights.items():
            assert torch.equal(tensor, full[name])
    return plan.recv_bytes


def cast_on_the_way():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    full = numbered_weights(SHARDED)
    source = fsdp_layout(SHARDED, range(world_size))
    target = replicated_layout(SHARDED, range(world_size), dtype="bfloat16")
    plan = plan_reshard(source, target)
    weights = empty_weights(target, rank)
    received = execute_reshard(plan, cut_weights(source, rank, full), weights)
    assert received == plan.recv_bytes[rank]
    assert_same(weights, {name: [tensor.to(torch.bfloat16)] for name, tensor in full.items()})


def move_between_disjoint_ranks():
    rank = dist.get_rank()
    full = numbered_weights(SHARDED)
    source, target = fsdp_layout(SHARDED, [2, 0]), replicated_layout(SHARDED, [1])
    weights = empty_weights(target, rank)
    received = execute_reshard(plan_reshard(source, target), cut_weights(source, rank, full), weights)
    assert_same(weights, cut_weights(target, rank, full))
    return received


def a_rank_outside_the_group_is_refused():
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return True
    shapes = {"w": (6,)}
    plan = plan_reshard(fsdp_layout(shapes, range(3)), replicated_layout(shapes, range(3)))
    with pytest.raises(ReshardError, match=r"ranks \[2\], which are not in its group \(0, 1\)"):
        ReshardExecutor(plan, group=group)
    return True


def wait_for_a_peer_that_does_not_come():
    shapes = {"w": (6,)}
    executor = ReshardExecutor(plan_reshard(fsdp_layout(shapes, range(2)), replicated_layout(shapes, range(2))))
    if dist.get_rank() == 0:
        shard = {"w": torch.ones(3)}
        with pytest.raises(ReshardError, match="the transfer of weights failed on rank 0"):
            executor.run(shard, {"w": torch.zeros(6)})
        assert torch.equal(shard["w"], torch.ones(3))


def test_random_layouts_reshard_bit_exactly_and_back(ranks2, ranks3):
    ranks2.run(reshard_between_random_layouts, 25)
    ranks3.run(reshard_between_random_layouts, 25)


@pytest.mark.parametrize("bucket_bytes", [16, 64, 1 << 20])
def test_fsdp_shards_reach_every_rank_within_the_bucket(ranks2, ranks3, bucket_bytes):
    elements = {name: torch.Size(shape).numel() for name, shape in SHARDED.items()}
    for received in (*ranks2.run(gather_fsdp_shards, bucket_bytes), *ranks3.run(gather_fsdp_shards, bucket_bytes)):
        assert sum(received.values()) == 4 * sum(elements.values()) * (len(received) - 1)


@pytest.mark.parametrize(("dtype", "item_bytes"), [("float32", 4), ("bfloat16", 2), ("float64", 8)])
def test_the_smallest_bucket_holds_four_elements(ranks2, dtype, item_bytes):
    """One element for each of two rounds in flight, out and in: it works, and one byte less is refused."""
    ranks2.run(fill_the_smallest_bucket, dtype, 4 * item_bytes)


def fill_the_smallest_bucket(dtype, bucket_bytes):
    rank = dist.get_rank()
    full = numbered_weights({"w": (5, 3)}, dtype)
    source, target = (make({"w": (5, 3)}, range(2), dtype=dtype) for make in (fsdp_layout, replicated_layout))
    plan = plan_reshard(source, target)
    weights = empty_weights(target, rank)
    ReshardExecutor(plan, bucket_bytes=bucket_bytes).run(cut_weights(source, rank, full), weights)
    assert_same(weights, cut_weights(target, rank, full))
    with pytest.raises(ReshardError, match=f"bucket_bytes={bucket_bytes - 1} does not hold four {dtype} elements"):
        ReshardExecutor(plan, bucket_bytes=bucket_bytes - 1)


def test_masters_are_cast_before_they_are_sent(ranks2):
    ranks2.run(cast_on_the_way)


def test_disjoint_ranks(ranks3):
    elements = sum(torch.Size(shape).numel() for shape in SHARDED.values())
    assert ranks3.run(move_between_disjoint_ranks) == [0, 4 * elements, 0]


def test_the_group_must_hold_every_peer(ranks3):
    assert ranks3.run(a_rank_outside_the_group_is_refused) == [True] * 3


def test_a_missing_peer_is_a_typed_error_within_the_deadline():
    with LocalRanks(2, timeout_s=3) as ranks:
        ranks.run(wait_for_a_peer_that_does_not_come)


def test_tensors_that_do_not_match_the_layout_are_refused():
    layout = replicated_layout({"a": (2, 3), "b": (4,)}, [0])
    check_weights(layout, 0, {"a": torch.zeros(2, 3), "b": [torch.zeros(4)]}, "target")
    with pytest.raises(ReshardError) as error:
        check_weights(layout, 0, {"a": torch.zeros(3, 2), "lora": torch.zeros(1)}, "target")
    for part in ("missing ['b']", "extra ['lora']", "'a' has shapes [(3, 2)], the layout says [(2, 3)]"):
        assert part in str(error.value)
