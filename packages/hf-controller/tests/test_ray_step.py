"""The ranks of a group stay in step after one of them failed, or say that they are not."""

from __future__ import annotations

import time

import pytest
import torch

from hf_controller import RayExecutor, ResourcePool, Worker, WorkerSpec, rebuild
from hf_protocols import ONE_TO_ALL, ParallelSpec, Topology, WorkerError, WorkerTimeoutError, register


class Member(Worker):
    @register(protocol=ONE_TO_ALL, returns="object")
    def total(self, value):
        total = torch.tensor(value)
        torch.distributed.all_reduce(total)
        return total.item()

    @register(protocol=ONE_TO_ALL, returns="object")
    def fail_on(self, ranks, then="meet"):
        if self.context.rank in ranks:
            raise KeyError("own")
        if then == "meet":
            torch.distributed.all_reduce(torch.tensor(100.0))
        time.sleep(2.0)


@pytest.fixture
def pool(ray_executor: RayExecutor):
    pool = ResourcePool([2], device="cpu", name="members")
    yield pool
    ray_executor.release(pool)


def test_ranks_that_left_a_call_do_not_meet_those_that_are_in_it(ray_executor, pool):
    """Rank 1 left a call in whose collective rank 0 waits: it would add its number to that one."""
    spec = WorkerSpec(worker=Member, topology=Topology(ParallelSpec(dp_size=2)))
    group = ray_executor.build_groups(pool, {"members": spec})["members"]
    assert group.total(1.0).result() == [2.0, 2.0]

    for ranks, then in (([0, 1], "meet"), ([1], "rest")):  # all fail; one fails, and the other is busy without it
        failed, after = group.fail_on(ranks, then), group.total(1.0)
        with pytest.raises(WorkerError, match=r"fail_on on rank [01] failed: KeyError: 'own'"):
            failed.result()
        assert after.result() == [2.0, 2.0]

    failed, after, alone = group.fail_on([1]), group.total(1.0), group.total(2.0)
    with pytest.raises(WorkerError, match=r"fail_on on rank 1 failed: KeyError: 'own'"):
        failed.result()
    with pytest.raises(WorkerError, match=r"out of step\. rebuild\(executor, \[pool\]\) builds") as refusal:
        after.result()
    earlier = "members.total: an earlier call members.fail_on failed on this rank"
    assert str(refusal.value).startswith(f"{earlier}, and rank(s) [0] wait in its collective: ")
    with pytest.raises(WorkerError, match=r"^members\.total: an earlier call members\.fail_on failed .* out of step"):
        alone.result()
    group = rebuild(ray_executor, [pool])["members"]
    assert group.total(1.0).result() == [2.0, 2.0]


@pytest.mark.slow
def test_a_collective_to_which_a_rank_does_not_come_names_what_that_one_is_at(ray_executor, pool):
    spec = WorkerSpec(worker=Alone, topology=Topology(ParallelSpec(dp_size=2)))
    group = ray_executor.build_groups(pool, {"members": spec})["members"]
    with pytest.raises(WorkerError) as error:
        group.meet().result(timeout_s=60)
    assert not isinstance(error.value, WorkerTimeoutError)
    first, *rest = str(error.value).splitlines()
    assert first.startswith("members.meet on rank 0 failed: RuntimeError: ")
    assert first.endswith("Raise collective_timeout_s, or look at what the other ranks are at:")
    assert any(line.startswith("rank 1: call ") and "members.meet: done, idle for " in line for line in rest)


class Alone(Worker):
    @register(protocol=ONE_TO_ALL, returns="object")
    def meet(self):
        if self.context.rank == 0:
            torch.distributed.all_reduce(torch.ones(()))
