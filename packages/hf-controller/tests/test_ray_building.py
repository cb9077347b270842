"""Groups that cannot be built: constructors that fail or hang, slots that are not there, classes that cannot travel."""

from __future__ import annotations

import os
import threading
import time

import pytest
import ray

from fragile_workers import Fragile, build
from hf_controller import InProcessExecutor, RemoteCallError, ResourcePool, Worker, WorkerSpec, rebuild
from hf_controller.executors.ray import placement
from hf_controller.executors.ray.placement import place
from hf_protocols import (
    DP,
    ONE_TO_ALL,
    ConfigError,
    ParallelSpec,
    PoolError,
    ProtocolError,
    Topology,
    WorkerTimeoutError,
    register,
)

TWO = Topology(ParallelSpec(dp_size=2))
ONE = Topology(ParallelSpec())


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        (["PENDING", "PREPARED", "RESCHEDULING"], ""),
        (["PENDING", "REMOVED"], "the placement group of its slots was removed"),
        (["PENDING", ""], "the placement group of its slots was removed"),
    ],
)
def test_a_pool_waits_for_its_placement_group_alone(ray_executor, monkeypatch, states, reason):
    left, read = iter(states), placement.placement_group_table

    def show(group):
        state = next(left, None)
        if state is None:
            return read(group)
        return {"state": state} if state else {}

    monkeypatch.setattr(placement, "placement_group_table", show)
    pool = ResourcePool([1], device="cpu")
    if reason:
        with pytest.raises(PoolError, match=reason):
            place(pool, 60.0)
        return
    monkeypatch.setattr(placement.PlacementGroup, "wait", None)
    placed = place(pool, 60.0)
    assert next(left, None) is None and placed.on_one_machine
    placed.remove()


class Unbuildable(Worker):
    needs_process_group = False

    def __init__(self, context, *, how):
        super().__init__(context)
        if how == "raise":
            raise ConfigError("no such model")
        if how == "hang":
            time.sleep(600)
        if how == "die":
            os._exit(3)
        raise KeyError("lost")

    @register(protocol=DP)
    def never(self, batch):
        return batch


class Nice(Worker):
    needs_process_group = False

    @register(protocol=ONE_TO_ALL, returns="object")
    def read_niceness(self):
        return os.nice(0)


def test_ranks_are_as_important_as_the_program(ray_executor):
    group = ray_executor.build_groups(ResourcePool([1], device="cpu"), {"nice": WorkerSpec(worker=Nice, topology=ONE)})
    assert group["nice"].read_niceness().result() == [os.nice(0)]


def test_a_raising_constructor_is_reported_and_frees_the_pool(ray_executor):
    for how, kind in (("raise", ConfigError), ("other", RemoteCallError)):
        spec = WorkerSpec(worker=Unbuildable, topology=ONE, kwargs={"how": how})
        group = ray_executor.build_groups(ResourcePool([1], device="cpu"), {"unbuildable": spec}, wait=False)[
            "unbuildable"
        ]
        called = group.never(1)
        with pytest.raises(kind):
            called.result()
        with pytest.raises(kind) as error:
            ray_executor.wait_until_ready()
        assert "unbuildable.__init__ on rank 0" in error.value.__notes__[0]
        with pytest.raises(PoolError, match="released"):
            group.never(1)


@pytest.mark.parametrize("on_ray", [False, True])
def test_a_missing_constructor_argument_starts_no_process(on_ray, request):
    with InProcessExecutor() as in_process:
        executor = request.getfixturevalue("ray_executor") if on_ray else in_process
        pool = ResourcePool([10**6], device="cpu")  # which is larger than the cluster
        spec = WorkerSpec(worker=Unbuildable, topology=Topology(ParallelSpec(dp_size=10**6)))
        message = r"^scorer: the constructor of Unbuildable is missing a required argument: 'how'. Add .* WorkerSpec"
        with pytest.raises(ProtocolError, match=message):
            executor.build_groups(pool, {"scorer": spec})
        assert executor.built_on(pool) == []


@pytest.mark.slow
def test_a_process_ended_by_its_constructor_is_reported_as_gone(ray_executor):
    spec = WorkerSpec(worker=Unbuildable, topology=ONE, kwargs={"how": "die"})
    lone = ResourcePool([1], device="cpu", name="lone")
    with pytest.raises(
        RemoteCallError, match=r"unbuildable.__init__ on rank 0 failed: .*process unbuildable/0 is gone"
    ) as death:
        ray_executor.build_groups(lone, {"unbuildable": spec})
    assert "\n" not in str(death.value)
    assert ", log /" in str(death.value)
    assert death.value.remote_traceback == ""
    (note,) = death.value.__notes__
    assert note.startswith("on pool 'lone' was ended: unbuildable; ")
    assert note.endswith("build_groups(...) builds on it again")


def test_a_failed_build_leaves_other_groups_of_its_pool_alone(ray_executor, pool):
    standing = build(ray_executor, pool)
    broken = WorkerSpec(worker=Unbuildable, topology=TWO, kwargs={"how": "raise"})
    group = ray_executor.build_groups(pool, {"broken": broken}, wait=False)["broken"]
    called = group.never(1)
    elsewhere = ResourcePool([1], device="cpu", name="elsewhere")
    other = ray_executor.build_groups(elsewhere, {"other": WorkerSpec(worker=Named, topology=ONE)}, wait=False)["other"]
    with pytest.raises(ConfigError, match="no such model") as error:
        ray_executor.wait_until_ready()
    assert error.value.__notes__[-1] == (
        "on pool 'fragile' was ended: broken; its other groups stand: fragile. build_groups(...) builds on it again"
    )
    with pytest.raises((ConfigError, RemoteCallError), match=r"no such model|process broken/\d is gone"):
        called.result()
    with pytest.raises(PoolError, match="group 'broken' is closed"):
        group.never(1)
    assert standing.meet().result() == [2.0, 2.0]
    ray_executor.wait_until_ready()
    assert other.answer().result() == ["other"]
    ray_executor.release(elsewhere)

    with pytest.raises(ConfigError, match="no such model") as error:
        ray_executor.build_groups(pool, {"good": WorkerSpec(worker=Fragile, topology=TWO), "broken": broken})
    assert "was ended: good, broken; its other groups stand: fragile." in error.value.__notes__[-1]
    assert [list(roles) for roles in ray_executor.built_on(pool)] == [["fragile"]]
    assert standing.meet().result() == [2.0, 2.0]


def test_a_failed_build_of_the_only_group_frees_its_pools_slots(ray_executor):
    pool = ResourcePool([1], device="cpu", name="alone")
    spec = WorkerSpec(worker=Unbuildable, topology=ONE, kwargs={"how": "raise"})
    with pytest.raises(ConfigError) as error:
        ray_executor.build_groups(pool, {"broken": spec})
    assert "it has no other group and gave its slots back" in error.value.__notes__[-1]
    assert ray_executor.built_on(pool) == []
    with pytest.raises(PoolError, match="no group is on pool 'alone'"):
        rebuild(ray_executor, [pool])


def test_a_constructor_that_hangs_ends_in_a_timeout(ray_executor, monkeypatch):
    spec = WorkerSpec(worker=Unbuildable, topology=ONE, kwargs={"how": "hang"})
    pool = ResourcePool([1], device="cpu")
    group = ray_executor.build_groups(pool, {"hanging": spec}, wait=False)["hanging"]
    try:
        until_s = time.monotonic() + 100.0
        while "time.sleep" not in (told := ray_executor.describe(group)[0]):
            assert time.monotonic() < until_s, told
        monkeypatch.setattr(ray_executor, "_start_timeout_s", 2.0)
        with pytest.raises(WorkerTimeoutError, match="hanging/0 not done with __init__ within 2 s") as timeout:
            ray_executor.wait_until_ready()
    finally:
        ray_executor.release(pool)
    assert "being constructed" in str(timeout.value)
    assert ", in construct" in str(timeout.value)


def test_the_timeout_of_a_start_says_that_the_slot_is_gone(ray_executor, monkeypatch):
    def place_and_lose(*args, **kwargs):
        placed = place(*args, **kwargs)
        monkeypatch.setattr(ray_executor, "_start_timeout_s", 2.0)  # of the start alone: placing may take longer
        for group in placed._groups:
            ray.util.remove_placement_group(group)
        return placed

    monkeypatch.setattr("hf_controller.executors.ray.executor.place", place_and_lose)
    pool = ResourcePool([1], device="cpu", name="lost")
    with pytest.raises(WorkerTimeoutError, match="nowhere/0 not done with __init__ within 2 s") as timeout:
        ray_executor.build_groups(pool, {"nowhere": WorkerSpec(worker=Named, topology=ONE)})
    assert "nowhere/0: no answer" in str(timeout.value)
    assert "it never started: its slot is gone, or Ray cannot start a process there" in str(timeout.value)
    assert ray_executor.built_on(pool) == []


def test_more_slots_than_the_cluster_has_are_refused_at_once(ray_executor):
    spec = WorkerSpec(worker=Fragile, topology=Topology(ParallelSpec(dp_size=99)))
    started = time.monotonic()
    with pytest.raises(PoolError, match=r"asks for 99 slots, that is 99 CPU; the cluster has .* of 16 CPU free"):
        ray_executor.build_groups(ResourcePool([99], device="cpu", name="huge"), {"fragile": spec})
    with pytest.raises(PoolError, match="1 CPU and 1 GPU; the cluster has"):
        ray_executor.build_groups(ResourcePool([1], name="gpus"), {"fragile": WorkerSpec(worker=Fragile, topology=ONE)})
    assert time.monotonic() - started < 60.0, "slots were waited for"


def test_slots_that_others_hold_are_refused_within_the_deadline(ray_executor, monkeypatch):
    monkeypatch.setattr(ray_executor, "_start_timeout_s", 2.0)
    blocker = ray.util.placement_group([{"CPU": 1.0}])
    assert blocker.wait(10)
    size = 16 - sum(pool.num_slots for pool in ray_executor._occupied)
    spec = WorkerSpec(worker=Fragile, topology=Topology(ParallelSpec(dp_size=size)))
    with pytest.raises(PoolError, match=r"of 16 CPU free on 1 machine.*not free within 2 s"):
        ray_executor.build_groups(ResourcePool([size], device="cpu"), {"fragile": spec})
    ray.util.remove_placement_group(blocker)


def test_slots_held_by_this_program_itself_are_refused_at_once(ray_executor, ray_stage):
    """Nobody else would ever give them back: the deadline of 180 s is not waited for."""
    spec = WorkerSpec(worker=Fragile, topology=Topology(ParallelSpec(dp_size=16)))
    with pytest.raises(PoolError, match=r"without this program's own pools '.*' is smaller"):
        ray_executor.build_groups(ResourcePool([16], device="cpu"), {"fragile": spec})


def test_a_topology_of_another_size_than_the_pool_is_refused(ray_executor):
    with pytest.raises(PoolError, match=r"fragile has 2 rank\(s\) .* pool 'pool' has 1 slot\(s\)"):
        build(ray_executor, ResourcePool([1], device="cpu"))
    with pytest.raises(PoolError, match=r"fragile has 2 rank\(s\) .* pool 'pool' has 2 \+ 1 = 3 slot\(s\)"):
        build(ray_executor, ResourcePool([2, 1], device="cpu"))


def test_roles_fused_with_a_one_layout_role_need_the_same_layout(ray_executor):
    class RigidBuild(Fragile):
        @classmethod
        def one_layout_per_process(cls, kwargs):
            return True

    specs = {
        "rigid": WorkerSpec(worker=RigidBuild, topology=TWO),
        "other": WorkerSpec(worker=Fragile, topology=Topology(ParallelSpec(tp_size=2))),
    }
    with pytest.raises(ProtocolError, match=r"rigid cannot share .*rigid is 1-1-2; other is 1-2-1\).*fused=True"):
        ray_executor.build_groups(ResourcePool([2], device="cpu"), specs, fused=True)


class Named(Worker):
    def __init__(self, context, *, lock=None):
        super().__init__(context)

    @register(protocol=ONE_TO_ALL, returns="object")
    def answer(self):
        return self.context.role


def make_bound_to(lock):
    class Bound(Worker):
        @register(protocol=ONE_TO_ALL, returns="object")
        def answer(self):
            with lock:
                return self.context.role

    return Bound


class Misnamed(Worker):
    @register(protocol=ONE_TO_ALL, returns="object")
    def topology(self):
        return None


def test_what_cannot_be_built_takes_no_slots(ray_executor):
    one = Topology(ParallelSpec(dp_size=1))
    good = WorkerSpec(worker=Named, topology=one)
    pool = ResourcePool([1], device="cpu", name="kept")
    wrong = {
        "argument lock, a lock, of Named cannot travel": {
            "good": good,
            "bad": WorkerSpec(worker=Named, topology=one, kwargs={"lock": threading.Lock()}),
        },
        r"good: Named, bad: .*Bound cannot travel .*lock.*constructor": {
            "good": good,
            "bad": WorkerSpec(worker=make_bound_to(threading.Lock()), topology=one),
        },
        "registers topology": {"good": good, "bad": WorkerSpec(worker=Misnamed, topology=one)},
    }
    for message, specs in wrong.items():
        with pytest.raises(ProtocolError, match=message):
            ray_executor.build_groups(pool, specs, fused=True)
        assert ray_executor.built_on(pool) == []
    group = ray_executor.build_groups(pool, {"good": good})["good"]
    with pytest.raises(ProtocolError, match="pool 'kept' has a group good already"):
        ray_executor.build_groups(pool, {"good": good})
    assert group.answer().result() == ["good"]
    ray_executor.release(pool)
