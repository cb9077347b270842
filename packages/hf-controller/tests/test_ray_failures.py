"""Reports of a group of which a rank raises, dies or hangs; and building the group again afterwards."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from fragile_workers import Fragile, build
from hf_controller import RemoteCallError, ResourcePool, Worker, WorkerSpec
from hf_controller.testing import SoloWorker
from hf_protocols import (
    ONE_TO_ALL,
    BatchError,
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


def test_slow_and_dead_ranks_are_named_and_the_group_is_rebuilt(ray_executor, pool, monkeypatch):
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
    assert death.value.exit_code in (3, None) and death.value.signal is None
    (note,) = death.value.__notes__
    assert note.startswith("the group fragile ended with it; fragile/0 was ")
    assert note.endswith(". rebuild(executor, [pool]) builds the groups of pool 'fragile' again")
    assert re.search(rf"given last: call \d+ fragile.meet; it was process {before[1]} on .*, log /", str(death.value))
    with pytest.raises(RemoteCallError, match="process fragile/1 is gone"):
        group.pid().result()
    assert "no answer" in ray_executor.describe(group)[1]

    ray_executor.release(pool)
    monkeypatch.setattr(ray_executor, "_collective_timeout_s", 100.0)  # the peers of who fails are not left to it
    again = build(ray_executor, pool)
    assert again.meet().result() == [2.0, 2.0]
    assert set(again.pid().result()).isdisjoint(before)
    with pytest.raises(PoolError, match="released"):
        group.pid()

    started = time.monotonic()
    with pytest.raises(RewardError, match="rank left the collective") as error:
        again.meet(but=1, how="raise").result()
    assert time.monotonic() - started < 60.0, "its peer waited for the collective's deadline"
    assert "fragile.meet on rank 1" in error.value.__notes__[0]


class Loose(Fragile):
    needs_process_group = False


def test_an_exception_on_every_rank_is_shown_once(ray_executor, pool, capfd):
    spec = WorkerSpec(worker=Loose, topology=TWO)
    group = ray_executor.build_groups(pool, {"fragile": spec})["fragile"]
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
def test_a_frozen_rank_is_named_with_its_last_call_and_process(ray_executor, pool):
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


def test_results_of_a_dead_rank_name_its_end_to_every_reader(ray_executor, ray_stage, capfd):
    pool = ResourcePool([1], device="cpu", name="mortal")
    group = ray_executor.build_groups(pool, {"mortal": WorkerSpec(worker=Fragile, topology=ONE)})["mortal"]
    kept = group.echo(TensorDict({"x": torch.zeros(4)}, batch_size=[4]))
    kept.wait()
    os.kill(group.pid().result()[0], signal.SIGKILL)
    with pytest.raises(WorkerError):
        group.pid().result()
    # Objects of a process go with it, soon after.
    end = r"process mortal/0 is gone: [^\n]* given last: call \d+ mortal\.pid; it was process \d+ on .*, log /"
    with pytest.raises(WorkerError, match=rf"^mortal\.pid on rank 0 failed: {end}"):  # noqa: PT012
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
    with pytest.raises(WorkerError, match=r"process short/0 is gone: its pool 'short' was released"):
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


def test_a_rank_that_interrupts_itself_fails_in_one_error(ray_stage):
    """Ray would say that the task was cancelled, and not why."""
    batch = TensorDict({"x": torch.zeros(4)}, batch_size=[4])
    with pytest.raises(RemoteCallError, match=r"^free\.fail on rank 1 failed: KeyboardInterrupt\n") as raised:
        ray_stage.free.fail(batch, "interrupt").result()
    assert "in fail" in raised.value.remote_traceback
    assert ray_stage.free.echo(batch).num_rows == 4


def test_what_a_method_returns_must_be_picklable(ray_executor, ray_stage):
    with pytest.raises(RemoteCallError, match=r"two.make_unpicklable on rank 0 failed: .*pickle"):
        ray_stage.two.make_unpicklable().result()


def test_arguments_may_be_anything_that_cloudpickle_takes(ray_stage):
    answer = ray_stage.solo.answer(lambda number: number + 1).result()
    assert answer["value"](1) == 2
    with pytest.raises(ProtocolError, match=r"solo\.answer: the argument number 1, a lock, cannot travel .*pickle"):
        ray_stage.solo.answer(threading.Lock())


class StubbornRank(Worker):
    @register(protocol=ONE_TO_ALL, returns="object")
    def answer(self):
        return self.context.role

    def close(self):
        raise OSError("the port is busy")


def test_a_worker_that_cannot_close_is_logged_with_role_and_rank(ray_executor, pool):
    specs = {role: WorkerSpec(worker=StubbornRank, topology=TWO) for role in ("first", "second")}
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


def test_a_batch_that_cannot_travel_is_refused_at_once(ray_executor):
    with pytest.raises(BatchError, match="column 'names'"):
        ray_executor.put(TensorDict({"names": ["a", "b"]}, batch_size=[2]))
