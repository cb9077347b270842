from __future__ import annotations

import random
from itertools import count, product

import pytest
import torch
import torch.distributed as dist

from engine_testing.weights import cut_weights, empty_weights, numbered_weights
from hf_engine.resharding.boxes import Box
from hf_engine.resharding.execute import ReshardExecutor, execute_reshard
from hf_engine.resharding.layouts import WeightLayout, fsdp_layout, replicated_layout
from hf_engine.resharding.moving import ShardMover
from hf_engine.resharding.plan import plan_reshard
from hf_engine.resharding.steps import Step
from hf_engine.resharding.tensor_checks import check_weights
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


def find_differing(tensors, expected):
    """Names of the tensors with other parts than are expected, and of those that only one side has."""
    differing = {*tensors} ^ {*expected}
    for name in {*tensors} & {*expected}:
        pairs = zip(tensors[name], expected[name], strict=True)
        differing |= set() if all(torch.equal(part, wanted) for part, wanted in pairs) else {name}
    return sorted(differing)


def assert_same(tensors, expected):
    assert not find_differing(tensors, expected)


def reshard_between_random_layouts(num_cases):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    full = numbered_weights(SHAPES)
    rng, moves = random.Random(world_size), []
    for _ in range(num_cases):
        source, target = (random_layout(rng, SHAPES, world_size) for _ in range(2))
        forth, back = plan_reshard(source, target), plan_reshard(target, source)
        bucket_bytes = rng.choice([16, 80, 4096])
        weights = empty_weights(target, rank)
        held = cut_weights(source, rank, full)
        received = ReshardExecutor(forth, bucket_bytes=bucket_bytes).run(held, weights).recv_bytes
        moves.append((received, forth.recv_bytes[rank], find_differing(weights, cut_weights(target, rank, full))))
        returned = empty_weights(source, rank)
        received = ReshardExecutor(back, bucket_bytes=bucket_bytes).run(weights, returned).recv_bytes
        moves.append((received, back.recv_bytes[rank], find_differing(returned, held)))
    return moves


def gather_fsdp_shards(bucket_bytes):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    full = numbered_weights(SHARDED)
    source, target = fsdp_layout(SHARDED, range(world_size)), replicated_layout(SHARDED, range(world_size))
    plan = plan_reshard(source, target)
    executor = ReshardExecutor(plan, bucket_bytes=bucket_bytes)
    # Every message ends in a checksum: two rounds in flight, one message for all receivers and one from every peer.
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


def share_buffers():
    """An executor whose buffers another one enlarges later sends and takes its pieces in the new ones."""
    rank, buffers = dist.get_rank(), []
    small, large = (
        plan_reshard(fsdp_layout(shapes, range(2)), replicated_layout(shapes, range(2)))
        for shapes in ({"w": (4, 3)}, {"w": (4, 3), "v": (40, 30)})
    )
    first = ReshardExecutor(small, buffers=buffers)
    executors = [(small, first), (small, first)]
    for number, (plan, executor) in enumerate(
        [*executors, (large, ReshardExecutor(large, buffers=buffers)), *executors]
    ):
        full, weights = numbered_weights(plan.source.shapes, version=number), empty_weights(plan.target, rank)
        executor.run(cut_weights(plan.source, rank, full), weights)
        assert_same(weights, cut_weights(plan.target, rank, full))
    return first.buffer_bytes, executor.buffer_bytes


def test_buffers_may_be_enlarged_between_runs(ranks2):
    for before, after in ranks2.run(share_buffers):
        assert before == after > 40 * 30 * 4


def run_in_and_out_of_inference_mode(blocks, verifies):
    """Buffers and views that one run leaves serve the next one; what is written is of no mode."""
    rank = dist.get_rank()
    full = numbered_weights(SHARDED)
    source, target = fsdp_layout(SHARDED, range(2)), replicated_layout(SHARDED, range(2))
    with torch.inference_mode(blocks[0]):
        executor = ReshardExecutor(plan_reshard(source, target), bucket_bytes=256, verify_transfers=verifies)
    shards, weights = cut_weights(source, rank, full), empty_weights(target, rank)
    for inside in blocks:
        for parts in weights.values():
            parts[0].zero_()
        with torch.inference_mode(inside):
            executor.run(shards, weights)
        assert_same(weights, cut_weights(target, rank, full))
    return True


@pytest.mark.parametrize("verifies", [False, True])
@pytest.mark.parametrize("blocks", [(True, False, True), (False, True, False)], ids=["first in", "first out"])
def test_runs_in_and_out_of_inference_mode_are_alike(ranks2, blocks, verifies):
    assert ranks2.run(run_in_and_out_of_inference_mode, blocks, verifies) == [True, True]


def cast_on_the_way():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    full = numbered_weights(SHARDED)
    source = fsdp_layout(SHARDED, range(world_size))
    target = replicated_layout(SHARDED, range(world_size), dtype="bfloat16")
    plan = plan_reshard(source, target)
    weights = empty_weights(target, rank)
    received = execute_reshard(plan, cut_weights(source, rank, full), weights)
    expected = {name: [tensor.to(torch.bfloat16)] for name, tensor in full.items()}
    return received, plan.recv_bytes[rank], find_differing(weights, expected)


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


def test_random_layouts_reshard_bit_exactly_and_back(ranks2, ranks3):
    for ranks in (ranks2, ranks3):
        for moves in ranks.run(reshard_between_random_layouts, 25):
            assert len(moves) == 50
            assert all(received == planned and not differing for received, planned, differing in moves)


@pytest.mark.parametrize("bucket_bytes", [16, 64, 1 << 20])
def test_fsdp_shards_reach_every_rank_within_the_bucket(ranks2, ranks3, bucket_bytes):
    elements = {name: torch.Size(shape).numel() for name, shape in SHARDED.items()}
    for received in (*ranks2.run(gather_fsdp_shards, bucket_bytes), *ranks3.run(gather_fsdp_shards, bucket_bytes)):
        assert sum(received.values()) == 4 * sum(elements.values()) * (len(received) - 1)


@pytest.mark.parametrize(("dtype", "item_bytes"), [("float32", 4), ("bfloat16", 2), ("float64", 8)])
def test_the_smallest_bucket_holds_four_elements(ranks2, dtype, item_bytes):
    """One element for each of two rounds in flight, out and in: it works, and one byte less is refused."""
    refusal = f"bucket_bytes={4 * item_bytes - 1} does not hold four {dtype} elements"
    for differing, message in ranks2.run(fill_the_smallest_bucket, dtype, 4 * item_bytes):
        assert not differing and refusal in message


def fill_the_smallest_bucket(dtype, bucket_bytes):
    rank = dist.get_rank()
    full = numbered_weights({"w": (5, 3)}, dtype)
    source, target = (make({"w": (5, 3)}, range(2), dtype=dtype) for make in (fsdp_layout, replicated_layout))
    plan = plan_reshard(source, target)
    weights = empty_weights(target, rank)
    ReshardExecutor(plan, bucket_bytes=bucket_bytes).run(cut_weights(source, rank, full), weights)
    with pytest.raises(ReshardError) as refused:
        ReshardExecutor(plan, bucket_bytes=bucket_bytes - 1)
    return find_differing(weights, cut_weights(target, rank, full)), str(refused.value)


def order_of_work():
    """Returns the order in which a rank starts rounds and copies them into place."""
    rank, log = dist.get_rank(), []
    plan = plan_reshard(fsdp_layout(SHARDED, range(2)), replicated_layout(SHARDED, range(2)))
    executor = ReshardExecutor(plan, bucket_bytes=64)

    def logged(name, real):
        def call(self, *args):
            log.append((name, executor._steps.index(self)))
            return real(self, *args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("start", "unpack"):
            patch.setattr(Step, name, logged(name, getattr(Step, name)))
        executor.run(cut_weights(plan.source, rank, numbered_weights(SHARDED)), empty_weights(plan.target, rank))
    return log


def test_a_round_is_unpacked_while_the_next_one_is_under_way(ranks2):
    for log in ranks2.run(order_of_work):
        last = len(log) // 2 - 1
        assert last > 2
        between = [step for index in range(1, last + 1) for step in (("start", index), ("unpack", index - 1))]
        assert log == [("start", 0), *between, ("unpack", last)]


def astray(operations):
    """The same batch, but what arrives arrives elsewhere."""
    return [
        dist.P2POp(o.op, torch.empty_like(o.tensor), group=o.group, group_peer=o.group_peer)
        if o.op is dist.irecv
        else o
        for o in operations
    ]


def lose_messages(is_lost, left=lambda tensor: None):
    """A `batch_isend_irecv` whose calls of these numbers bring nothing; `left` treats the memory they should fill."""
    numbers = count()

    def batch(operations, real=dist.batch_isend_irecv):
        if not is_lost(next(numbers)):
            return real(operations)
        works = real(astray(operations))
        for operation in operations:
            if operation.op is dist.irecv:
                left(operation.tensor)
        return works

    return batch


def take_wrong_messages(what, verifies):
    """Equal rounds use the same two buffers, so what stands there already has the right form."""
    rank, shapes = dist.get_rank(), dict.fromkeys("abcd", (8, 4))
    plan = plan_reshard(fsdp_layout(shapes, range(2)), replicated_layout(shapes, range(2)))
    executor = ReshardExecutor(plan, bucket_bytes=512, verify_transfers=verifies)
    num_rounds = len(executor._steps)
    assert num_rounds >= 4
    for change in range(2):
        full = numbered_weights(shapes, version=change)
        weights = empty_weights(plan.target, rank)
        executor.run(cut_weights(plan.source, rank, full), weights)
        assert_same(weights, cut_weights(plan.target, rank, full))
    losses = {
        "lost": lose_messages(lambda number: number == 2),
        "all lost, those of the run before in place": lose_messages(lambda number: True),
        "zeros": lose_messages(lambda number: True, torch.Tensor.zero_),
    }
    with pytest.MonkeyPatch.context() as patch:
        if what in losses:
            patch.setattr(dist, "batch_isend_irecv", losses[what])
        elif rank == 0:
            executor._steps[:2] = executor._steps[1::-1]
        held = cut_weights(plan.source, rank, numbered_weights(shapes, version=2))
        with pytest.raises(ReshardError) as refused:
            executor.run(held, empty_weights(plan.target, rank), version=0 if what == "zeros" else None)
    return str(refused.value)


@pytest.mark.parametrize("verifies", [False, True])
@pytest.mark.parametrize("what", ["lost", "all lost, those of the run before in place", "zeros", "swapped"])
def test_a_message_passes_for_no_other(ranks2, what, verifies):
    for message in ranks2.run(take_wrong_messages, what, verifies):
        assert "the checksums differ" in message


def lose_on_rank_0():
    """Only what rank 0 should receive is lost; rank 1 has its weights."""
    rank, shapes = dist.get_rank(), {"w": (8, 4)}
    plan = plan_reshard(fsdp_layout(shapes, range(2)), replicated_layout(shapes, range(2)))
    full, weights = numbered_weights(shapes), empty_weights(plan.target, rank)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(dist, "batch_isend_irecv", lose_messages(lambda number: True))
            with pytest.raises(ReshardError) as refused:
                ReshardExecutor(plan).run(cut_weights(plan.source, rank, full), weights)
            return str(refused.value)
        ReshardExecutor(plan).run(cut_weights(plan.source, rank, full), weights)
    return find_differing(weights, cut_weights(plan.target, rank, full))


def test_the_rank_that_misses_a_message_says_so(ranks2):
    message, differing = ranks2.run(lose_on_rank_0)
    assert "rank 0 received something else than the ranks [1] sent" in message
    assert not differing


def send_as(version):
    rank, shapes = dist.get_rank(), {"w": (4,)}
    plan = plan_reshard(fsdp_layout(shapes, range(2)), replicated_layout(shapes, range(2)))
    weights = cut_weights(plan.source, rank, numbered_weights(shapes))
    with pytest.raises(ReshardError) as refused:
        ReshardExecutor(plan).run(weights, empty_weights(plan.target, rank), version=version)
    return str(refused.value)


@pytest.mark.parametrize("version", [1.5, -1, True, "1", 2**31 - 1])
def test_a_version_is_a_whole_number(ranks2, version):
    for message in ranks2.run(send_as, version):
        assert f"version={version!r} must be" in message


def test_masters_are_cast_before_they_are_sent(ranks2):
    for received, planned, differing in ranks2.run(cast_on_the_way):
        assert received == planned and not differing


def test_disjoint_ranks(ranks3):
    elements = sum(torch.Size(shape).numel() for shape in SHARDED.values())
    assert ranks3.run(move_between_disjoint_ranks) == [0, 4 * elements, 0]


def test_the_group_must_hold_every_peer(ranks3):
    assert ranks3.run(a_rank_outside_the_group_is_refused) == [True] * 3


def mistake_on_rank_1(rank):
    """Yields the wrong arguments of rank 1, and the message of every rank; the others learn who and why."""
    plan = plan_reshard(fsdp_layout(SHARDED, range(2)), replicated_layout(SHARDED, range(2)))
    full = numbered_weights(SHARDED)
    held, wanted = cut_weights(plan.source, rank, full), empty_weights(plan.target, rank)
    lacking = {name: parts for name, parts in held.items() if name != "norm"}
    doubled = {name: [part.double() for part in parts] for name, parts in wanted.items()}
    yield held, wanted, -1, r"version=-1 must be a whole number"
    yield lacking, wanted, 3, r"the source tensors of rank 1 .*missing \['norm'\]"
    yield (
        held,
        doubled,
        3,
        r"the target tensors of rank 1 .*all 4 are float64, but the layout",
    )
    yield held, {**wanted, "head": [None]}, 3, r"'head' has \[None\] in place of one tensor per box"
    yield None, wanted, 3, "the source tensors of rank 1 are None. Use a mapping"


def refuse_together():
    rank, moved = dist.get_rank(), dist.batch_isend_irecv
    plan = plan_reshard(fsdp_layout(SHARDED, range(2)), replicated_layout(SHARDED, range(2)))
    executor, full = ReshardExecutor(plan), numbered_weights(SHARDED)
    held = cut_weights(plan.source, rank, full)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", lambda operations: pytest.fail("weights moved"))
        for source, target, version, message in mistake_on_rank_1(rank):
            if rank == 0:
                source, target, version = held, empty_weights(plan.target, 0), 3
                message = f"rank 1 refused: .*{message}.*; no weights were moved"
            with pytest.raises(ReshardError, match=message):
                executor.run(source, target, version=version)
        with pytest.raises(
            ReshardError, match=r"different plans, bucket_bytes or verify_transfers; rank .* has bucket_"
        ):
            ReshardExecutor(plan, bucket_bytes=64 << rank).run(held, empty_weights(plan.target, rank))
        wanted = empty_weights(plan.target, rank)
        mover = ShardMover(plan, rank, empty_weights(plan.source, rank), wanted)
        with pytest.raises(ReshardError, match=rf"the mover of rank {rank} was built on other tensors. Build one on"):
            executor.run(held, wanted, mover=mover)
    assert dist.batch_isend_irecv is moved
    weights = empty_weights(plan.target, rank)
    executor.run(held, weights, version=3)
    return find_differing(weights, cut_weights(plan.target, rank, full))


def test_a_mistake_on_one_rank_fails_all_before_anything_moves(ranks2):
    assert ranks2.run(refuse_together) == [[], []]


def give_rank_1_what_cannot_be():
    shapes, rank = {"w": (8, 4)}, dist.get_rank()
    plan = plan_reshard(fsdp_layout(shapes, range(2)), replicated_layout(shapes, range(2)))
    held, wanted = empty_weights(plan.source, rank), empty_weights(plan.target, rank)
    for wrong, message in (
        ({"device": "nope"}, "device='nope' cannot be used"),
        ({"device": "meta"}, "device='meta' holds no bytes"),
        ({"plan": None}, "plan=None. Use a ReshardPlan"),
    ):
        given = {"plan": plan, "source": held, "target": wanted} | (wrong if rank else {})
        with pytest.raises(ReshardError, match=message if rank else f"rank 1 refused: {message}"):
            execute_reshard(**given)
    with pytest.raises(ReshardError, match=r"^bucket_bytes=1 does not hold four"):
        ReshardExecutor(plan, bucket_bytes=1)
    for ranks in ([0], [0, 0], "ab", [0, 1, 2]):
        with pytest.raises(ReshardError, match=r"ranks=.*. Use one plan rank for each of the 2 ranks of the group"):
            ReshardExecutor(plan, ranks=ranks)
    return execute_reshard(plan, held, wanted)


def test_one_ranks_argument_that_cannot_be_is_an_error_on_all(ranks2):
    assert ranks2.run(give_rank_1_what_cannot_be) == [64, 64]  # half of 8 x 4 floats, once the arguments are right


def stand_outside():
    group = dist.new_group([0, 1])
    shapes, rank = {"w": (8, 4)}, dist.get_rank()
    plan = plan_reshard(fsdp_layout(shapes, range(2)), replicated_layout(shapes, range(2)))
    received = None
    if rank == 2:
        for outside in (group, "x"):
            with pytest.raises(ReshardError, match=r"Use a process group that this rank is in|is not in the group"):
                execute_reshard(plan, {}, {}, outside)
    else:
        received = execute_reshard(plan, empty_weights(plan.source, rank), empty_weights(plan.target, rank), group)
    dist.barrier()
    return received


def test_a_rank_outside_of_the_group_runs_no_plan(ranks3):
    assert ranks3.run(stand_outside) == [64, 64, None]


def plans_that_differ():
    """As many rounds and bytes, but other pieces; a plan without rounds next to one with some; other senders."""
    rank, shapes = dist.get_rank(), {"a": (8, 4), "b": (8, 4)}
    sharded, whole = fsdp_layout(shapes, range(2)), replicated_layout(shapes, range(2))
    columns = WeightLayout(
        shapes=shapes, boxes={r: {name: (Box((0, 2 * r), (8, 2)),) for name in shapes} for r in range(2)}
    )
    stays, moves = plan_reshard(whole, sharded), plan_reshard(sharded, whole)
    assert not stays.messages
    for one, other in [(stays, moves), (moves, stays), (moves, plan_reshard(columns, whole))]:
        plan = other if rank else one
        source, target = empty_weights(plan.source, rank), empty_weights(plan.target, rank)
        with pytest.raises(ReshardError, match=rf"different plans, bucket_bytes or verify_transfers; rank {rank} has"):
            execute_reshard(plan, source, target)
    return execute_reshard(stays, empty_weights(whole, rank), empty_weights(sharded, rank))


def test_ranks_of_different_plans_are_refused_at_once(ranks2):
    assert ranks2.run(plans_that_differ) == [0, 0]  # one plan on both: nothing has to move


def test_tensors_that_do_not_match_the_layout_are_refused():
    layout = replicated_layout({"a": (2, 3), "b": (4,)}, [0])
    check_weights(layout, 0, {"a": torch.zeros(2, 3), "b": [torch.zeros(4)]}, "target")
    with pytest.raises(ReshardError) as error:
        check_weights(layout, 0, {"a": torch.zeros(3, 2), "lora": torch.zeros(1)}, "target")
    for part in ("missing ['b']", "extra ['lora']", "'a' has shapes [(3, 2)], the layout says [(2, 3)]"):
        assert part in str(error.value)
