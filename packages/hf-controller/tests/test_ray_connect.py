"""Groups of other processes in one process group, and what a rank's process finds around it."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from hf_controller import (
    InProcessExecutor,
    RayExecutor,
    ResourcePool,
    Worker,
    WorkerContext,
    WorkerSpec,
    connect,
    rebuild,
)
from hf_controller.testing import SoloWorker
from hf_protocols import (
    ONE_TO_ALL,
    ParallelSpec,
    ProtocolError,
    Topology,
    WorkerError,
    WorkerTimeoutError,
    register,
)


def test_two_groups_meet_in_collectives_and_keep_their_own(ray_stage):
    name = connect(ray_stage.two, ray_stage.three)
    assert name == "two-three"
    left, right = ray_stage.two.meet(name), ray_stage.three.meet(name)
    assert left.result() + right.result() == [(rank, 10.0, 104.0) for rank in range(5)]
    assert ray_stage.two.sum_of_ranks().result() == [1.0, 1.0]

    connect(ray_stage.three, ray_stage.solo, name="another")
    left, right = ray_stage.three.meet("another"), ray_stage.solo.meet("another")
    assert left.result() + right.result() == [(rank, 6.0, 103.0) for rank in range(4)]

    with pytest.raises(ProtocolError, match="two has a connection 'two-three' already"):
        connect(ray_stage.two, ray_stage.three)
    # Refused before any rank waits for others: the group whose name is free goes on.
    with pytest.raises(ProtocolError, match="two has a connection 'two-three' already"):
        connect(ray_stage.two, ray_stage.solo, name="two-three")
    assert ray_stage.solo.answer(1).result(20)["value"] == 1
    assert connect(ray_stage.solo, ray_stage.three, name="third") == "third"


def test_groups_that_share_processes_are_not_connected(ray_stage):
    with pytest.raises(ProtocolError, match="share their processes"):
        connect(ray_stage.two, ray_stage.sharded)


def test_groups_of_two_executors_are_not_connected(ray_stage):
    with InProcessExecutor() as executor:
        spec = WorkerSpec(worker=SoloWorker, topology=Topology(ParallelSpec()))
        alone, other = (
            executor.build_groups(ResourcePool([1], device="cpu"), {role: spec})[role] for role in ("alone", "other")
        )
        with pytest.raises(ProtocolError, match="different executors"):
            connect(ray_stage.two, alone)
        with pytest.raises(ProtocolError, match=r"cannot connect alone and other. Use RayExecutor"):
            connect(alone, other)


def test_ranks_find_what_torchrun_would_set(ray_stage):
    expected = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "PROBE": "set"}
    expected["CUDA_VISIBLE_DEVICES"] = ""  # of ranks on the host
    found = ray_stage.two.environment().result()
    assert found == [{"RANK": str(rank), "LOCAL_RANK": str(rank), **expected} for rank in range(2)]


class LinkedSide(Worker):
    """A group of one rank that says what it has."""

    needs_process_group = False

    @register(protocol=ONE_TO_ALL, returns="object")
    def meet(self, name):
        torch.distributed.all_reduce(torch.ones(()), group=self.context.connections[name].group)

    @register(protocol=ONE_TO_ALL, returns="object")
    def meet_a_stranger(self, name):
        torch.distributed.broadcast(torch.ones(()), src=7, group=self.context.connections[name].group)

    @register(protocol=ONE_TO_ALL, returns="object")
    def sleep(self, seconds):
        time.sleep(seconds)

    @register(protocol=ONE_TO_ALL, returns="object")
    def pid(self):
        return os.getpid()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_dead_partner_stays_the_cause_after_it_is_rebuilt(ray_executor: RayExecutor) -> None:
    spec = WorkerSpec(worker=LinkedSide, topology=Topology(ParallelSpec()))
    pools = [ResourcePool([1], device="cpu", name=name) for name in ("left", "right")]
    left, right = (ray_executor.build_groups(pool, {pool.name: spec}, wait=False)[pool.name] for pool in pools)
    try:
        connect(left, right, name="pair")
        waiting = left.meet("pair")
        os.kill(right.pid().result()[0], signal.SIGKILL)
        built = rebuild(ray_executor, pools[1:])  # they ended together, and are built together
        left, right = built["left"], built["right"]
        with pytest.raises(WorkerError, match=r"^right\.pid on rank 0 failed: process right/0 is gone") as death:
            waiting.result()
        assert "the groups right, left ended with it; left/0 was in left.meet" in death.value.__notes__[-1]
        connect(left, right, name="pair")
        joined = [side.meet("pair") for side in (left, right)]
        assert [each.result() for each in joined] == [[None], [None]]
    finally:
        for pool in pools:
            ray_executor.release(pool)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rank_too_late_for_a_connection_does_not_wait(
    ray_executor: RayExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = WorkerSpec(worker=LinkedSide, topology=Topology(ParallelSpec()))
    pools = [ResourcePool([1], device="cpu", name=name) for name in ("left", "right")]
    left, right = (ray_executor.build_groups(pool, {pool.name: spec})[pool.name] for pool in pools)
    try:
        monkeypatch.setattr(ray_executor, "_start_timeout_s", 5.0)
        monkeypatch.setattr(ray_executor, "_collective_timeout_s", 100.0)  # ranks that wait are made to leave
        busy = left.sleep(12.0)
        with pytest.raises(WorkerTimeoutError, match="right/0, left/0 not done with connect within 5 s"):
            connect(right, left, name="late")
        busy.result()
        assert left.pid().result(timeout_s=12.0) != right.pid().result(timeout_s=12.0)
        monkeypatch.undo()
        connect(right, left, name="late")
    finally:
        for pool in pools:
            ray_executor.release(pool)


class UnbuildableSide(LinkedSide):
    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        time.sleep(3.0)
        raise ValueError("this constructor is wrong")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_group_survives_a_partner_that_is_unbuilt_or_frozen(
    ray_executor: RayExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = [ResourcePool([1], device="cpu", name=name) for name in ("sound", "frozen", "unbuilt")]
    classes = (LinkedSide, LinkedSide, UnbuildableSide)
    sound, frozen, unbuilt = (
        ray_executor.build_groups(
            pool,
            {pool.name: WorkerSpec(worker=worker, topology=Topology(ParallelSpec()))},
            wait=worker is LinkedSide,
        )[pool.name]
        for pool, worker in zip(pools, classes, strict=True)
    )
    try:
        # The other rank would wait for less long than the constructor takes.
        monkeypatch.setattr(ray_executor, "_collective_timeout_s", 1.0)
        for pair in ((sound, unbuilt), (unbuilt, sound)):
            with pytest.raises(WorkerError, match=r"unbuilt\.__init__ on rank 0 failed: ValueError: this constructor"):
                connect(*pair)
        os.kill(frozen.pid().result()[0], signal.SIGSTOP)
        monkeypatch.setattr(ray_executor, "_start_timeout_s", 2.0)
        with pytest.raises(WorkerTimeoutError, match=r"^frozen/0 not done with connect within 2 s"):
            connect(frozen, sound)
        # While the other is still frozen.
        assert len(sound.pid().result(timeout_s=20.0)) == 1
    finally:
        for pool in pools:
            ray_executor.release(pool)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_released_partner_is_not_blamed_for_earlier_failures(ray_executor: RayExecutor) -> None:
    spec = WorkerSpec(worker=LinkedSide, topology=Topology(ParallelSpec()))
    pools = [ResourcePool([1], device="cpu", name=name) for name in ("left", "right")]
    left, right = (ray_executor.build_groups(pool, {pool.name: spec}, wait=False)[pool.name] for pool in pools)
    try:
        connect(left, right, name="pair")
        failed = left.meet_a_stranger("pair")
        left.pid().result()  # the call before it is over
        ray_executor.release(pools[1])
        with pytest.raises(WorkerError, match=r"^left\.meet_a_stranger on rank 0 failed: ValueError: .*7"):
            failed.result()
    finally:
        for pool in pools:
            ray_executor.release(pool)


def test_two_groups_of_one_role_are_refused_before_a_rank_waits(ray_executor: RayExecutor) -> None:
    spec = WorkerSpec(worker=LinkedSide, topology=Topology(ParallelSpec()))
    pools = [ResourcePool([1], device="cpu", name=name) for name in ("left", "right")]
    try:
        first, second = (ray_executor.build_groups(pool, {"side": spec}, wait=False)["side"] for pool in pools)
        with pytest.raises(ProtocolError, match="both groups have the role 'side', which distinguishes"):
            connect(first, second)
    finally:
        for pool in pools:
            ray_executor.release(pool)


def test_connect_refuses_groups_that_take_turns_on_one_pool(ray_executor: RayExecutor) -> None:
    spec = WorkerSpec(worker=LinkedSide, topology=Topology(ParallelSpec()))
    pool = ResourcePool([1], device="cpu", name="shared")
    try:
        groups = ray_executor.build_groups(pool, {"left": spec, "right": spec}, wait=False)
        with pytest.raises(ProtocolError, match=r"left and right stand on one pool \('shared'\) and take turns"):
            connect(groups["left"], groups["right"])
    finally:
        ray_executor.release(pool)
