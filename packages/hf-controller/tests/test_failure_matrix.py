"""One failure ends a group, and those that it is joined with: who failed, how, where, and that nothing of it stays.

A few cells run with every change; `make test-failures` runs all, and writes how long each message took.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from hf_controller import RayExecutor, ResourcePool, Worker, WorkerSpec, connect, rebuild
from hf_controller.executors.ray.actor_ref import ActorRef
from hf_controller.failures import Deadline
from hf_protocols import ONE_TO_ALL, ParallelSpec, Topology, WorkerError, WorkerTimeoutError, register

HOWS = ("raise", "exit", "SIGKILL", "SIGSTOP")
PLACES = ("before", "inside", "after", "construction", "generation", "commit")
GROUPS = ("one", "two")
CELLS = list(itertools.product(HOWS, PLACES, GROUPS))
IN_CI = {
    ("raise", "inside", "one"),
    ("raise", "commit", "two"),
    ("exit", "before", "two"),
    ("exit", "construction", "one"),
    ("SIGKILL", "after", "one"),
    ("SIGKILL", "generation", "two"),
    ("SIGKILL", "before", "one"),
    ("SIGSTOP", "inside", "two"),
}
"""Twelve with the cells under torchrun: every row and every column. A stopped rank waits for a deadline: `slow`."""
MESSAGES = {
    "raise": r"KeyError: 'the rank failed'",
    "exit": r"process \w+/1 is gone: (exit code 7|The actor)",
    "SIGKILL": r"process \w+/1 is gone: (signal 9 \(SIGKILL\)|The actor)",
    "SIGSTOP": r"\w+/1 did not move",
}


def fail(how: str) -> None:
    """Of the process that runs it."""
    if how == "raise":
        raise KeyError("the rank failed")
    if how == "exit":
        os._exit(7)
    os.kill(os.getpid(), getattr(signal, how))


class Member(Worker):
    """Fails on rank 1 as requested, in one of the phases of a step."""

    def __init__(self, context, *, how=None):
        super().__init__(context)
        if how is not None:
            if context.rank == 1:
                fail(how)
            self._meet()

    @register(protocol=ONE_TO_ALL, returns="object")
    def pid(self):
        return os.getpid()

    @register(protocol=ONE_TO_ALL, returns="object")
    def step(self, how, place, folder):
        """Collectives, a generation without one, and files that are written between two of them."""
        at = {"before": "start", "after": "end"}.get(place, place)
        for phase, work in (
            ("start", self._meet),
            ("inside", self._meet),
            ("generation", lambda: time.sleep(0.1)),
            ("commit", lambda: Path(folder, f"{self.context.rank}").write_text("half")),
            ("end", self._meet),
        ):
            if at == phase and how == "SIGKILL" and place == "inside":
                # Rank 1 waits in a collective, for which the other one is late, when it is killed.
                if self.context.rank == 1:
                    threading.Timer(0.3, fail, [how]).start()
                else:
                    time.sleep(1)
            elif self.context.rank == 1 and at == phase:
                fail(how)
            work()
        if self.context.rank == 1 and place == "after":
            fail(how)
        self._meet()

    def _meet(self):
        groups = [each.group for each in self.context.connections.values()]
        for group in groups or [None]:
            torch.distributed.all_reduce(torch.ones(()), group=group)

    @register(protocol=ONE_TO_ALL, returns="object")
    def join(self):
        """The other group's side of a step."""
        for _ in range(4):
            self._meet()


class Bystander(Worker):
    needs_process_group = False

    @register(protocol=ONE_TO_ALL, returns="object")
    def answer(self):
        return self.context.rank


SPEC = WorkerSpec(worker=Member, topology=Topology(ParallelSpec(dp_size=2)))


@pytest.fixture(scope="module")
def reward(ray_executor: RayExecutor):
    """A group without a process group, which goes on."""
    pool = ResourcePool([2], device="cpu", name="reward")
    yield ray_executor.build_groups(pool, {"reward": WorkerSpec(worker=Bystander, topology=SPEC.topology)})["reward"]
    ray_executor.release(pool)


@pytest.fixture
def pools(ray_executor: RayExecutor):
    pools = {role: ResourcePool([2], device="cpu", name=role) for role in ("actor", "rollout")}
    yield pools
    for pool in pools.values():
        ray_executor.release(pool)


def note(record: dict[str, object]) -> None:
    """For `docs/reference/recovery-contract.md`: only `make test-failures` asks for it."""
    path = os.environ.get("HYBRIDFLOW_FAILURES")
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def find_marks(cell: tuple[str, str, str]) -> tuple[pytest.MarkDecorator, ...]:
    if cell not in IN_CI:
        return (pytest.mark.failures,)
    return (pytest.mark.slow,) if cell[0] == "SIGSTOP" else ()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("how", "place", "groups"),
    [pytest.param(*cell, marks=find_marks(cell), id="-".join(cell)) for cell in CELLS],
)
def test_a_failure_ends_its_groups(ray_executor, reward, pools, how, place, groups, tmp_path, monkeypatch):
    roles = ["actor", "rollout"][: GROUPS.index(groups) + 1]
    before = {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}
    # Who is stopped never answers: the deadline can be short wherever the others have room.
    deadline = Deadline(5.0 if how == "SIGSTOP" else 120.0, "deadlines.train_s")
    if place == "construction":
        fail_in_construction(ray_executor, pools["actor"], how, groups, monkeypatch)
        assert reward.answer().result() == [0, 1]
        return
    built = {role: ray_executor.build_groups(pools[role], {role: SPEC}, wait=False)[role] for role in roles}
    ray_executor.wait_until_ready()
    if groups == "two":
        connect(*built.values())
    pids = [pid for group in built.values() for pid in group.pid().result()]
    with ray_executor.deadline(deadline):
        called = [built["actor"].step(how, place, str(tmp_path)), *(built[role].join() for role in roles[1:])]
    started_s = time.monotonic()
    with pytest.raises(WorkerError) as raised:
        called[-1].result()  # the other group's call fails for the same reason
    took_s = time.monotonic() - started_s
    said = "\n".join([str(raised.value), *raised.value.__notes__])
    note({"how": how, "place": place, "groups": groups, "launcher": "ray", "seconds": took_s, "message": said})
    assert re.search(MESSAGES[how], said), said
    assert str(raised.value).startswith("actor.step"), said
    assert (
        f"the group{'s' * (len(roles) > 1)} {', '.join(roles)} ended with it; actor/0 was " in said or how == "SIGSTOP"
    )
    assert "rebuild(executor, [pool]) builds the groups of pool 'actor'" in said
    if how == "SIGSTOP":
        assert isinstance(raised.value, WorkerTimeoutError) and "deadlines.train_s" in said
    with pytest.raises(type(raised.value), match=re.escape(str(raised.value).splitlines()[0])):
        built[roles[-1]].pid()  # every later call answers with the first failure
    until_s = time.monotonic() + 60.0
    while any(map(is_alive, pids)):
        assert time.monotonic() < until_s, "a process of the group stays"
        time.sleep(0.1)
    assert reward.answer().result() == [0, 1]  # it has no process group
    if how in ("raise", "SIGSTOP"):
        again = rebuild(ray_executor, [pools["actor"]])
        assert sorted(again) == sorted(roles)
        assert set(again["actor"].pid().result()).isdisjoint(pids)
    until_s = time.monotonic() + 30.0
    while left := {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")} - before:
        assert time.monotonic() < until_s, left  # segments of tests that run at the same time go by themselves
        time.sleep(0.1)


def fail_in_construction(executor, pool, how, groups, monkeypatch):
    spec = WorkerSpec(worker=Member, topology=SPEC.topology, kwargs={"how": how})
    if how == "SIGSTOP":
        monkeypatch.setitem(executor._deadlines, "__init__", Deadline(30.0, "deadlines.start_s"))
        monkeypatch.setattr(executor, "_collective_timeout_s", 120.0)  # the deadline comes first, as by default
    started_s = time.monotonic()
    with pytest.raises(WorkerError) as raised:
        executor.build_groups(pool, {"actor": spec})
    said = "\n".join([str(raised.value), *raised.value.__notes__])
    took_s = time.monotonic() - started_s
    record = {"how": how, "place": "construction", "groups": groups, "launcher": "ray"}
    note(record | {"seconds": took_s, "message": said})
    wanted = r"not done with __init__ within 30 s. Raise deadlines.start_s" if how == "SIGSTOP" else MESSAGES[how]
    assert re.search(wanted, said), said
    assert "on pool 'actor' was ended: actor" in said
    assert executor.built_on(pool) == []


def test_a_process_gone_before_it_is_watched_ends_as_ray_says(ray_executor, pools, monkeypatch):
    find_end = ActorRef.find_end

    def find_late(process):
        if process.rank == 1:
            location, until_s = process.find_location(), time.monotonic() + 60.0
            if location is None:
                return None
            while Path(f"/proc/{location.pid}").exists() and time.monotonic() < until_s:  # a zombie has an exit code
                time.sleep(0.05)
        return find_end(process)

    monkeypatch.setattr(ActorRef, "find_end", find_late)
    spec = WorkerSpec(worker=Member, topology=SPEC.topology, kwargs={"how": "exit"})
    with pytest.raises(WorkerError, match=r"process actor/1 is gone: The actor") as raised:
        ray_executor.build_groups(pools["actor"], {"actor": spec})
    assert "it ended (" not in str(raised.value)


def test_mistakes_that_all_ranks_agree_on_leave_the_group(ray_executor, pools):
    group = ray_executor.build_groups(pools["actor"], {"actor": WorkerSpec(worker=Agreed, topology=SPEC.topology)})
    for _ in range(2):
        with pytest.raises(WorkerError, match="all agreed"):
            group["actor"].refuse([0, 1]).result()
        assert group["actor"].total().result() == [2.0, 2.0]
    with pytest.raises(WorkerError, match="all agreed") as raised:
        group["actor"].refuse([1]).result()
    assert "the group actor ended with it; actor/0 was idle" in raised.value.__notes__[-1]


class Agreed(Worker):
    @register(protocol=ONE_TO_ALL, returns="object")
    def refuse(self, ranks):
        if self.context.rank in ranks:
            raise WorkerError("all agreed")

    @register(protocol=ONE_TO_ALL, returns="object")
    def total(self):
        total = torch.ones(())
        torch.distributed.all_reduce(total)
        return total.item()
