"""The counter of torch.distributed's bytes: every way to move them is counted or refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from engine_testing.traffic import _REDUCTIONS, _SILENT, count_traffic
from hf_engine.resharding.execute import ReshardExecutor
from hf_engine.resharding.layouts import fsdp_layout, replicated_layout
from hf_engine.resharding.plan import plan_reshard
from hf_engine.testing import LocalRanks

SHAPES = {"w": (64, 4), "v": (32, 2)}
KIB = 256
"""Elements of float32 in a kibibyte."""


def full():
    return torch.ones(KIB)


def parts(number):
    return [full() for _ in range(number)]


def first_has(values):
    return values if dist.get_rank() == 0 else None


CALLS = {
    "all_gather": (lambda n: dist.all_gather(parts(n), full()), [2, 2, 2]),
    "all_gather_single": (lambda n: dist.all_gather_single(torch.ones(n * KIB), full()), [2, 2, 2]),
    "all_to_all": (lambda n: dist.all_to_all(parts(n), parts(n)), [2, 2, 2]),
    "all_to_all_single": (lambda n: dist.all_to_all_single(torch.ones(n * KIB), torch.ones(n * KIB)), [2, 2, 2]),
    "broadcast": (lambda n: dist.broadcast(full(), 1), [1, 0, 1]),
    "gather": (lambda n: dist.gather(full(), first_has(parts(n)), 0), [2, 0, 0]),
    "scatter": (lambda n: dist.scatter(full(), first_has(parts(n)), 0), [0, 1, 1]),
    "ring": (lambda n: exchange(dist.isend, dist.irecv), [1, 1, 1]),
    "batch": (lambda n: batch(), [1, 1, 1]),
    "the group's own method": (
        lambda n: dist.group.WORLD.broadcast([full()], dist.BroadcastOptions()).wait(),
        [0, 1, 1],
    ),
}
REDUCED = {
    "all_reduce": lambda n: dist.all_reduce(full()),
    "reduce": lambda n: dist.reduce(full(), 0),
    "reduce_scatter_tensor": lambda n: dist.reduce_scatter_tensor(full(), torch.ones(n * KIB)),
}


def neighbours():
    rank, size = dist.get_rank(), dist.get_world_size()
    return (rank + 1) % size, (rank - 1) % size


def exchange(send, receive):
    to, source = neighbours()
    works = [send(full(), to), receive(full(), source)]
    for work in works:
        work.wait()


def batch():
    to, source = neighbours()
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, full(), to), dist.P2POp(dist.irecv, full(), source)])
    for work in works:
        work.wait()


def count_call(name):
    call = CALLS[name][0]
    with count_traffic() as traffic:
        call(dist.get_world_size())
    assert traffic.reduced_bytes == 0
    return traffic.recv_bytes / 1024


def count_reduction(name):
    with count_traffic() as traffic:
        REDUCED[name](dist.get_world_size())
    assert traffic.recv_bytes == 0
    return traffic.reduced_bytes, traffic.matches(0)


def count_objects():
    with count_traffic() as traffic:
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, "x" * 1000)
    assert found[0] == "x" * 1000
    return traffic.recv_bytes, traffic.object_bytes, traffic.matches(0), traffic.matches(0, most_object_bytes=4096)


def call_what_is_not_known():
    with count_traffic(), pytest.raises(NotImplementedError, match="_c10d_functional"):
        functional.all_gather_tensor(full(), 0, dist.group.WORLD)
    return True


def send_more(how):
    """A right executor, and one that also moves whole weights by another function."""

    class CountedExecutor(ReshardExecutor):
        def run(self, source, target, **options):
            transfer = super().run(source, target, **options)
            EXTRA[how](target["v"])
            return transfer

    plan = plan_reshard(fsdp_layout(SHAPES, range(3)), replicated_layout(SHAPES, range(3)))
    rank = dist.get_rank()
    verdicts = []
    for executor in (ReshardExecutor(plan), CountedExecutor(plan)):
        source = {name: [torch.ones(box.shape) for box in boxes] for name, boxes in plan.source.boxes_of(rank).items()}
        target = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        with count_traffic() as traffic:
            executor.run(source, target, version=1)
        assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in target.values())
        verdicts.append(traffic.matches(plan.recv_bytes[rank]))
    return verdicts


EXTRA = {
    "all_gather": lambda whole: dist.all_gather([torch.empty_like(whole) for _ in range(3)], whole),
    "broadcast": lambda whole: dist.broadcast(whole, 0),
    "all_reduce": lambda whole: dist.all_reduce(whole, op=dist.ReduceOp.MAX),
    "all_gather_object": lambda whole: dist.all_gather_object([None] * 3, whole),
    "the group's own method": lambda whole: dist.group.WORLD.allgather(
        [[whole.clone() for _ in range(3)]], [whole]
    ).wait(),
}


@pytest.fixture(scope="module")
def ranks3():
    with LocalRanks(3) as ranks:
        yield ranks


@pytest.mark.parametrize("name", CALLS)
def test_every_function_brings_its_bytes(ranks3, name):
    assert ranks3.run(count_call, name) == CALLS[name][1]


@pytest.mark.parametrize("name", REDUCED)
def test_reductions_of_more_than_a_verdict_do_not_match(ranks3, name):
    for reduced, matches in ranks3.run(count_reduction, name):
        assert reduced >= 1024
        assert not matches


def test_objects_are_counted_apart(ranks3):
    for received, told, matches, matches_with_objects in ranks3.run(count_objects):
        assert received == 0
        assert 2000 < told < 4096
        assert not matches
        assert matches_with_objects


def test_what_is_not_known_is_refused(ranks3):
    assert ranks3.run(call_what_is_not_known) == [True] * 3


@pytest.mark.parametrize("how", EXTRA)
def test_an_executor_that_sends_too_much_does_not_match_its_plan(ranks3, how):
    right, wrong = zip(*ranks3.run(send_more, how), strict=True)
    assert all(right)
    assert not any(wrong[1:])  # a broadcast brings rank 0 nothing


def test_the_operators_of_this_torch_are_all_known():
    names = {s.name.partition("::")[2] for s in torch._C._jit_get_all_schemas() if s.name.startswith("c10d::")}
    received = {
        "allgather_",
        "_allgather_base_",
        "allgather_coalesced_",
        "allgather_into_tensor_coalesced_",
        "gather_",
        "broadcast_",
        "scatter_",
        "recv_",
        "recv_any_source_",
        "alltoall_",
        "alltoall_base_",
    }
    assert names == received | _REDUCTIONS | _SILENT
