"""Calls run in the order in which they were made, and never wait for each other in a circle."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import ray
import torch
from tensordict import TensorDict

from hf_controller import Deadline, ResourcePool, Worker, WorkerSpec
from hf_controller.testing import ProbeWorker
from hf_protocols import DP, RANK_ZERO, ParallelSpec, Topology, WorkerError, WorkerTimeoutError, register


def batch(num_rows: int = 4, width: int = 1) -> TensorDict:
    return TensorDict({"x": torch.zeros(num_rows, width)}, batch_size=[num_rows])


class UnevenWorker(Worker):
    """Its second rank is slow."""

    needs_process_group = False

    @register(protocol=DP, returns="object")
    def work(self, seconds: float = 0.0) -> tuple[float, float]:
        start_s = time.time()
        time.sleep(seconds * self.context.rank)
        return start_s, time.time()

    @register(protocol=RANK_ZERO, returns="object")
    def work_on_rank_zero(self) -> None:
        pass


def test_a_group_that_is_built_later_waits_for_every_slot(ray_executor):
    spec = WorkerSpec(worker=UnevenWorker, topology=Topology(ParallelSpec(dp_size=2)))
    pool = ResourcePool([2], device="cpu", name="shared")
    try:
        first = ray_executor.build_groups(pool, {"first": spec})["first"]
        slow = first.work(8.0)
        first.work_on_rank_zero()  # the last call, which says nothing about the slow rank
        late = ray_executor.build_groups(pool, {"late": spec})["late"]
        assert min(start_s for start_s, _ in late.work().result()) >= max(end_s for _, end_s in slow.result())
    finally:
        ray_executor.release(pool)


class HostWorker(Worker):
    """Says when it ran, and in which process."""

    needs_process_group = False

    @register(protocol=RANK_ZERO, returns="object")
    def work(self, seconds: float = 0.0) -> tuple[float, float]:
        start_s = time.time()
        time.sleep(seconds)
        return start_s, time.time()

    @register(protocol=DP)
    def give(self, rows: TensorDict, seconds: float = 0.0) -> TensorDict:
        time.sleep(seconds)
        return rows.clone()

    @register(protocol=RANK_ZERO, returns="object")
    def pid(self) -> int:
        return os.getpid()


def test_a_call_failing_before_its_turn_keeps_the_calls_in_order(ray_executor):
    spec = WorkerSpec(worker=HostWorker, topology=Topology(ParallelSpec()))
    shared, apart = (ResourcePool([1], device="cpu", name=name) for name in ("of four", "apart"))
    try:
        roles = ("slow", "doomed", "next", "last")
        groups = ray_executor.build_groups(shared, dict.fromkeys(roles, spec), wait=False)
        giver = ray_executor.build_groups(apart, {"giver": spec})["giver"]
        slow, doomed, following, last = (groups[role] for role in roles)
        pids = [group.pid().result() for group in (doomed, giver)]
        working = slow.work(5.0)
        without_input = slow.give(giver.give(batch(), seconds=60.0))
        waiting = following.work()  # for a call of a process that lives, and whose input will be lost
        dying = doomed.work()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="process doomed/0 is gone"):
            dying.result()
        overtaking = last.work()  # the call before it has failed already
        ends_s = working.result()[1]
        assert min(waiting.result()[0], overtaking.result()[0]) >= ends_s
        with pytest.raises(WorkerError, match="process giver/0 is gone"):
            without_input.result()
    finally:
        ray_executor.release(shared)
        ray_executor.release(apart)


def test_a_call_behind_one_that_hangs_has_its_turn(ray_executor):
    """The deadline of a call begins with its turn, and ends the group of the one that hangs."""
    spec = WorkerSpec(worker=HostWorker, topology=Topology(ParallelSpec()))
    pool = ResourcePool([1], device="cpu", name="taken")
    try:
        groups = ray_executor.build_groups(pool, {"first": spec, "second": spec})
        with ray_executor.deadline(Deadline(1.0, "deadlines.train_s")):
            busy = groups["first"].work(600.0)
        groups["second"].work().result(timeout_s=120.0)
        late = r"^first\.work is not done after 1 s on rank\(s\) 0: Raise deadlines\.train_s if it was only slow"
        with pytest.raises(WorkerTimeoutError, match=late) as error:
            busy.result()
        assert "first.work: computing for " in str(error.value) and "time.sleep(seconds)" in str(error.value)
    finally:
        ray_executor.release(pool)


def test_other_pools_do_not_wait(ray_stage):
    slow = ray_stage.two.step(batch(), seconds=4.0)
    assert ray_stage.three.step(batch()).result()["end"].max() < slow.result()["end"].min()


def test_a_rank_that_waits_for_its_inputs_answers_questions(ray_executor, ray_stage, tmp_path):
    ray_executor.describe(ray_stage.two)  # starts what asks ranks
    released = tmp_path / "released"
    unready = ray_stage.three.step(batch(), seconds=90.0, until=str(released))
    waiting = ray_stage.two.step(unready)
    behind = ray_stage.colocated.step(batch())
    wanted = {"two": ("waiting for the inputs of call", "two.step"), "behind": ("colocated.step", "earlier call")}
    until_s = time.monotonic() + 60.0
    while True:
        found = {"two": ray_executor.describe(ray_stage.two), "behind": ray_executor.describe(ray_stage.colocated)}
        if all(word in text for name in found for text in found[name].values() for word in wanted[name]):
            break
        assert time.monotonic() < until_s, found
    answered_s = time.time()
    released.touch()
    assert "colocated.step: waiting for the pool's earlier call" in found["behind"][0]
    assert "in wait" in found["behind"][0]
    assert answered_s < unready.result()["end"].min()
    assert waiting.result()["end"].max() <= behind.result()["start"].min()


def test_pools_that_feed_each_other_do_not_wait_in_a_circle(ray_stage):
    future = ray_stage.two.step(batch())
    for turn in range(20):
        future = (ray_stage.three, ray_stage.colocated, ray_stage.two)[turn % 3].step(future)
    assert future.result()["x"].flatten().tolist() == [21.0] * 4


def test_a_call_answers_before_it_runs(ray_stage):
    slow = future = ray_stage.two.step(batch(), seconds=4.0)
    for _ in range(10):
        future = ray_stage.three.step(future)
    answered_s = time.time()
    assert answered_s < slow.result()["end"].min()
    assert future.num_rows == 4


def test_dropped_futures_free_their_memory(ray_stage):
    for step in range(75):
        made = ray_stage.two.step(batch(width=2**18))  # 4 MiB, in a store of 200
        assert ray_stage.solo.step(made).num_rows == 4
        if step == 9:
            del made
            time.sleep(1.5)  # Ray publishes the store's size twice a second
            used_bytes = _used_bytes()
    del made
    _wait_until_used(used_bytes + 2**22)


def test_unused_results_are_freed_if_the_trace_is_never_drained(ray_stage):
    for step in range(60):
        assert len(ray_stage.solo.answer(bytes(2**22)).result()["value"]) == 2**22  # 240 MiB, in a store of 200
        if step == 9:
            time.sleep(1.5)  # Ray publishes the store's size twice a second
            used_bytes = _used_bytes()
    _wait_until_used(used_bytes + 2**22)


def test_results_beyond_memory_are_spilled_and_read_back(ray_stage):
    made = [ray_stage.solo.step(batch(width=15 * 2**18)) for _ in range(4)]  # 60 MiB each, in a store of 200
    assert [ray_stage.two.step(each).rows([3]).result()["x"].mean().item() for each in made] == [2.0] * 4


@pytest.mark.slow
def test_results_with_deleted_spill_files_are_reported_as_lost(ray_executor):
    """On pools of its own: Ray may look for what is lost for as long as a call wants it."""
    spec = WorkerSpec(worker=ProbeWorker, topology=Topology(ParallelSpec()))
    pools = [ResourcePool([1], device="cpu", name=name) for name in ("maker", "reader")]
    try:
        maker, reader = (ray_executor.build_groups(pool, {pool.name: spec})[pool.name] for pool in pools)
        made = [maker.step(batch(width=15 * 2**18)) for _ in range(6)]
        made[-1].wait()
        deadline_s = time.monotonic() + 30.0
        while not (files := list(Path(_session_folder()).glob("ray_spilled_objects*/*"))):
            assert time.monotonic() < deadline_s
            time.sleep(0.2)
        for file in files:
            file.unlink(missing_ok=True)  # Ray deletes by itself those of batches that were dropped before
        with pytest.raises(WorkerError, match=r"an earlier call's result is lost.* spilled to disk and could not"):  # noqa: PT012
            for each in made:
                reader.step(each).result(timeout_s=20.0)
    finally:
        for pool in pools:
            ray_executor.release(pool)


def _session_folder() -> str:
    return ray._private.worker.global_worker.node.get_session_dir_path()


def _used_bytes() -> float:
    return ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"]


def _wait_until_used(most_bytes: float) -> None:
    """Frees take their time; what nobody frees stays."""
    deadline_s = time.monotonic() + 30.0
    while (used_bytes := _used_bytes()) > most_bytes:
        assert time.monotonic() < deadline_s, (used_bytes, most_bytes)
        time.sleep(0.5)
