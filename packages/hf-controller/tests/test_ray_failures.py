"""What a group says when a rank raises, dies, hangs or cannot start; and that it can be built again afterwards."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from tensordict import TensorDict

from hf_controller import RayExecutor, RemoteCallError, ResourcePool, Worker, WorkerGroup, WorkerSpec, rebuild
from hf_controller.executors.ray.placement import place
from hf_controller.testing import SoloWorker
from hf_protocols import (
    ALL_TO_ALL,
    DP,
    ONE_TO_ALL,
    BatchError,
    ConfigError,
    ParallelSpec,
    PerRank,
    PoolError,
    ProtocolError,
    RewardError,
    Topology,
    WorkerError,
    WorkerTimeoutError,
    register,
)

TWO = Topology(ParallelSpec(dp_size=2))
ONE = Topology(ParallelSpec())


class Fragile(Worker):
    @register(protocol=DP)
    def echo(self, batch):
        return batch.clone()

    @register(protocol=ONE_TO_ALL, returns="object")
    def pid(self):
        return os.getpid()

    @register(protocol=ONE_TO_ALL, returns="object")
    def sleep_on(self, rank, seconds):
        if self.context.rank == rank:
            time.sleep(seconds)
        return rank

    @register(protocol=ONE_TO_ALL, returns="object")
    def raise_on_all(self):
        raise KeyError(f"rank {self.context.rank}")

    @register(protocol=ALL_TO_ALL, returns="object")
    def say(self, text):
        print(text)

    @register(protocol=ONE_TO_ALL, returns="object")
    def meet(self, but=None, how=None):
        if self.context.rank == but:
            if how == "raise":
                raise RewardError("rank left the collective")
            os._exit(3)
        total = torch.ones(())
        torch.distributed.all_reduce(total)
        return total.item()


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


def build(executor: RayExecutor, pool: ResourcePool) -> WorkerGroup:
    return executor.build_groups(pool, {"fragile": WorkerSpec(worker=Fragile, topology=TWO)})["fragile"]


@pytest.fixture
def pool(ray_executor: RayExecutor) -> Iterator[ResourcePool]:
    pool = ResourcePool([2], device="cpu", name="fragile")
    yield pool
    ray_executor.release(pool)


def test_slow_and_dead_ranks_are_named_and_the_group_can_be_built_again(ray_executor, pool):
    group = build(ray_executor, pool)
    before = group.pid().result()
    ray_executor.describe(group)  # starts what asks ranks
    with pytest.raises(WorkerTimeoutError) as timeout:
        group.sleep_on(1, 10.0).result(timeout_s=2.0)  # a loaded machine takes seconds to be asked what it is at
    assert "rank(s) 1:" in str(timeout.value)
    assert "fragile.sleep_on: computing" in str(timeout.value)
    assert "time.sleep(seconds)" in str(timeout.value)
    assert f"process {before[1]} on " in str(timeout.value)
    assert "idle" in ray_executor.describe(group)[0]

    with pytest.raises(RemoteCallError, match=r"fragile.meet on rank 1 failed: .*process fragile/1 is gone") as death:
        group.meet(but=1, how="die").result()
    assert death.value.rank == 1
    assert str(death.value).endswith("; rebuild(executor, [pool]) builds the groups of pool 'fragile' again")
    assert re.search(rf"given last: call \d+ fragile.meet; it was process {before[1]} on .*, log /", str(death.value))
    with pytest.raises(RemoteCallError, match="process fragile/1 is gone"):
        group.pid().result()
    assert "no answer" in ray_executor.describe(group)[1]

    ray_executor.release(pool)
    again = build(ray_executor, pool)
    assert again.meet().result() == [2.0, 2.0]
    assert set(again.pid().result()).isdisjoint(before)
    with pytest.raises(PoolError, match="released"):
        group.pid()

    started = time.monotonic()
    with pytest.raises(RewardError, match="rank left the collective") as error:
        again.meet(but=1, how="raise").result()
    assert time.monotonic() - started < 10.0  # its peer hangs on until the collective's deadline, 15 s
    assert "fragile.meet on rank 1" in error.value.__notes__[0]


def test_an_exception_on_every_rank_is_shown_once(ray_executor, pool, capfd):
    group = build(ray_executor, pool)
    with pytest.raises(RemoteCallError, match=r"fragile.raise_on_all on rank [01] failed: KeyError") as error:
        group.raise_on_all().result()
    # What a rank prints arrives in its order: after these lines nothing of the call before can come.
    group.say(PerRank(["apples", "pears"])).result()
    shown, deadline_s = "".join(traceback.format_exception(error.value)), time.monotonic() + 30.0
    while not all(line in shown for line in ("[fragile/0] apples", "[fragile/1] pears")):
        assert time.monotonic() < deadline_s, shown
        time.sleep(0.1)
        shown += "".join(capfd.readouterr())
    assert shown.count('raise KeyError(f"rank {self.context.rank}")') == 1


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named_with_its_last_call_and_process(ray_executor, pool):
    group = build(ray_executor, pool)
    pid = group.pid().result()[1]
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WorkerTimeoutError) as timeout:
        group.meet().result(timeout_s=1.0)
    assert "rank(s) 0, 1:" in str(timeout.value)
    assert "rank 0: call" in str(timeout.value)
    assert re.search(
        rf"rank 1: no answer .* given last: call \d+ fragile.meet; .* process {pid} on ", str(timeout.value)
    )


def test_a_constructor_that_raises_is_reported_and_frees_the_pool(ray_executor):
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


@pytest.mark.slow
def test_a_constructor_that_ends_its_process_is_described_like_any_other_death(ray_executor):
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


def test_a_group_that_cannot_be_built_leaves_the_others_of_its_pool_alone(ray_executor, pool):
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


def test_a_pool_whose_only_group_cannot_be_built_gives_its_slots_back(ray_executor):
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


def test_a_process_that_cannot_be_placed_any_more_ends_in_a_timeout_that_says_so(ray_executor, monkeypatch):
    monkeypatch.setattr(ray_executor, "_start_timeout_s", 10.0)

    def place_and_lose(*args, **kwargs):
        placed = place(*args, **kwargs)
        for group in placed._groups:
            ray.util.remove_placement_group(group)
        return placed

    monkeypatch.setattr("hf_controller.executors.ray.executor.place", place_and_lose)
    pool = ResourcePool([1], device="cpu", name="lost")
    with pytest.raises(WorkerTimeoutError, match="nowhere/0 not done with __init__ within 10 s") as timeout:
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
    assert time.monotonic() - started < 5.0


def test_slots_that_others_hold_are_refused_within_the_deadline(ray_executor, monkeypatch):
    monkeypatch.setattr(ray_executor, "_start_timeout_s", 2.0)
    blocker = ray.util.placement_group([{"CPU": 1.0}])
    assert blocker.wait(10)
    size = 16 - sum(pool.num_slots for pool in ray_executor._occupied)
    spec = WorkerSpec(worker=Fragile, topology=Topology(ParallelSpec(dp_size=size)))
    with pytest.raises(PoolError, match=r"of 16 CPU free on 1 machine.*not free within 2 s"):
        ray_executor.build_groups(ResourcePool([size], device="cpu"), {"fragile": spec})
    ray.util.remove_placement_group(blocker)


def test_slots_that_this_program_holds_itself_are_refused_at_once(ray_executor, ray_stage):
    """Nobody else would ever give them back: the deadline of 180 s is not waited for."""
    spec = WorkerSpec(worker=Fragile, topology=Topology(ParallelSpec(dp_size=16)))
    with pytest.raises(PoolError, match="smaller beside this program's own pools '"):
        ray_executor.build_groups(ResourcePool([16], device="cpu"), {"fragile": spec})


def test_a_topology_of_another_size_than_the_pool_is_refused(ray_executor):
    with pytest.raises(PoolError, match=r"fragile has 2 rank\(s\) .* pool 'pool' has 1 slot\(s\)"):
        build(ray_executor, ResourcePool([1], device="cpu"))
    with pytest.raises(PoolError, match=r"fragile has 2 rank\(s\) .* pool 'pool' has 2 \+ 1 = 3 slot\(s\)"):
        build(ray_executor, ResourcePool([2, 1], device="cpu"))


def test_fused_roles_of_a_library_with_one_layout_have_one_layout(ray_executor):
    class Rigid(Fragile):
        @classmethod
        def one_layout_per_process(cls, kwargs):
            return True

    specs = {
        "rigid": WorkerSpec(worker=Rigid, topology=TWO),
        "other": WorkerSpec(worker=Fragile, topology=Topology(ParallelSpec(tp_size=2))),
    }
    with pytest.raises(ProtocolError, match=r"rigid cannot share .*rigid is 1-1-2; other is 1-2-1\).*fused=True"):
        ray_executor.build_groups(ResourcePool([2], device="cpu"), specs, fused=True)


def test_results_of_a_released_pool_are_lost_and_say_so(ray_executor, ray_stage):
    pool = ResourcePool([1], device="cpu", name="short")
    group = ray_executor.build_groups(pool, {"short": WorkerSpec(worker=SoloWorker, topology=ONE)})["short"]
    future = group.echo(TensorDict({"x": torch.zeros(4)}, batch_size=[4]))
    future.wait()
    ray_executor.release(pool)
    deadline_s = time.monotonic() + 20.0
    with pytest.raises(WorkerError, match="an earlier call's result is lost"):  # noqa: PT012
        while time.monotonic() < deadline_s:  # Ray frees them soon after
            assert future.result()["x"].tolist() == [0.0] * 4
            time.sleep(0.5)
    with pytest.raises(WorkerError, match="an earlier call's result is lost"):
        ray_stage.two.echo(future).result()


def test_what_a_dead_rank_made_names_its_end_to_the_controller_and_to_readers(ray_executor, ray_stage, capfd):
    pool = ResourcePool([1], device="cpu", name="mortal")
    group = ray_executor.build_groups(pool, {"mortal": WorkerSpec(worker=Fragile, topology=ONE)})["mortal"]
    kept = group.echo(TensorDict({"x": torch.zeros(4)}, batch_size=[4]))
    kept.wait()
    os.kill(group.pid().result()[0], signal.SIGKILL)
    with pytest.raises(WorkerError):
        group.pid().result()
    # Objects of a process go with it, soon after.
    end = r"process mortal/0 is gone: [^\n]* given last: call \d+ mortal\.pid; it was process \d+ on .*, log .*rebuild"
    with pytest.raises(WorkerError, match=rf"^mortal\.echo on rank 0 failed: .*result is lost: {end}"):  # noqa: PT012
        for _ in range(40):
            kept.result()
            time.sleep(0.5)
    reader = ray_stage.two.echo(kept)
    with pytest.raises(WorkerError, match=end):
        reader.result()
    del reader, kept
    ray_executor.release(pool)
    assert ray_stage.two.echo(TensorDict({"x": torch.zeros(4)}, batch_size=[4])).num_rows == 4
    assert "Unhandled error" not in capfd.readouterr().err


def test_calls_of_a_released_pool_and_of_a_dead_rank_say_so(ray_executor, ray_stage):
    pool = ResourcePool([1], device="cpu", name="short")
    specs = {"short": WorkerSpec(worker=Fragile, topology=ONE)}
    group = ray_executor.build_groups(pool, specs)["short"]
    group.sleep_on(0, 60.0)
    future = group.echo(TensorDict({"x": torch.zeros(4)}, batch_size=[4]))
    reader = ray_stage.two.echo(future)
    ray_executor.release(pool)
    with pytest.raises(WorkerError, match=r"process short/0 is gone: .* its pool 'short' was released"):
        future.result()
    with pytest.raises(WorkerError, match=r"result is lost with its process: [^\n]*; a pool that was released takes"):
        reader.result()

    group = ray_executor.build_groups(pool, specs)["short"]
    try:
        os.kill(group.pid().result()[0], signal.SIGKILL)
        for call in (group.pid, group.raise_on_all):
            with pytest.raises(WorkerError, match=r"given last: call \d+ short\.pid;"):
                call().result()
    finally:
        ray_executor.release(pool)


def test_a_rank_that_interrupts_itself_fails_its_call_in_one_error(ray_stage):
    """Ray would say that the task was cancelled, and not why."""
    batch = TensorDict({"x": torch.zeros(4)}, batch_size=[4])
    with pytest.raises(RemoteCallError, match=r"^two\.fail on rank 1 failed: KeyboardInterrupt\n") as raised:
        ray_stage.two.fail(batch, "interrupt").result()
    assert "in fail" in raised.value.remote_traceback
    assert ray_stage.two.echo(batch).num_rows == 4


def test_what_a_method_returns_must_be_picklable(ray_executor, ray_stage):
    with pytest.raises(RemoteCallError, match=r"two.make_unpicklable on rank 0 failed: .*pickle"):
        ray_stage.two.make_unpicklable().result()


def test_arguments_may_be_anything_that_cloudpickle_takes(ray_stage):
    answer = ray_stage.solo.answer(lambda number: number + 1).result()
    assert answer["value"](1) == 2
    with pytest.raises(ProtocolError, match=r"solo\.answer: the argument number 1, a lock, cannot travel .*pickle"):
        ray_stage.solo.answer(threading.Lock())


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


class Stubborn(Named):
    def close(self):
        raise OSError("the port is busy")


def test_a_worker_that_cannot_close_is_logged_with_role_and_rank(ray_executor, pool):
    specs = {role: WorkerSpec(worker=Stubborn, topology=TWO) for role in ("first", "second")}
    group = ray_executor.build_groups(pool, specs, fused=True)["first"]
    assert group.answer().result() == ["first"] * 2
    logs = [re.search(r", log (\S+)", text)[1] for text in ray_executor.describe(group).values()]
    ray_executor.release(pool)
    for rank, log in enumerate(logs):
        said = [line for line in Path(log).read_text().splitlines() if "close() raised" in line]
        assert said == [
            f"[first+second/{rank}] {role} on rank {rank}: close() raised OSError: the port is busy"
            for role in ("first", "second")
        ]


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


def test_a_batch_that_cannot_travel_is_refused_at_once(ray_executor):
    with pytest.raises(BatchError, match="column 'names'"):
        ray_executor.put(TensorDict({"names": ["a", "b"]}, batch_size=[2]))
