"""Groups are built again in the same program, and nothing of the old ones stays: no process, port or shared memory."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from hf_controller import InProcessExecutor, ResourcePool, Worker, WorkerSpec, rebuild
from hf_protocols import ONE_TO_ALL, ParallelSpec, PoolError, Topology, WorkerError, register


class Counter(Worker):
    def __init__(self, context, *, start=0):
        super().__init__(context)
        self.value = start

    @register(protocol=ONE_TO_ALL, returns="object")
    def add(self, amount):
        total = torch.tensor(float(amount))
        if self.context.world_size > 1:
            torch.distributed.all_reduce(total)
        self.value += total.item()
        return self.value

    @register(protocol=ONE_TO_ALL, returns="object")
    def pid(self):
        return os.getpid()

    @register(protocol=ONE_TO_ALL, returns="object")
    def fail(self):
        raise KeyError("lost")


class Footprint(NamedTuple):
    processes: int
    ports: int
    shared_memory: frozenset[str]


def measure_footprint() -> Footprint:
    """Of this program and all that it started."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            parents[int(folder.name)] = int(fields[1])
    family = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    sockets = set()
    for pid in family:
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                sockets.add(os.readlink(fd))
            except OSError:
                continue
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    listening = {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}
    memory = frozenset(name for name in os.listdir("/dev/shm") if not name.startswith("sem."))
    return Footprint(len(family), len(listening), memory)


def wait_until_no_larger(than: Footprint, within_s: float = 30.0) -> None:
    """Each part of it: Ray may meanwhile have ended an idle process of its own."""
    deadline_s = time.monotonic() + within_s
    found = measure_footprint()
    while not all(now <= before for now, before in zip(found, than, strict=True)):
        assert time.monotonic() < deadline_s, (found, than)
        time.sleep(0.2)
        found = measure_footprint()


def hurt(group, how: str) -> None:
    """Make a call that fails, and leave the group as such a failure leaves it."""
    pid = group.pid().result()[1]
    if how == "raise":
        call = group.fail()
    else:
        os.kill(pid, signal.SIGKILL if how == "die" else signal.SIGSTOP)
        call = group.add(1)
    with pytest.raises(WorkerError):
        call.result(timeout_s=60.0 if how != "stand still" else 1.0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_groups_are_rebuilt_and_nothing_of_the_old_ones_stays(ray_executor):
    pool, other = ResourcePool([2], device="cpu", name="hurt"), ResourcePool([1], device="cpu", name="other")
    specs = {
        role: WorkerSpec(worker=Counter, topology=Topology(ParallelSpec(dp_size=2)), kwargs={"start": start})
        for role, start in (("one", 10), ("two", 20))
    }
    bystander = {"bystander": WorkerSpec(worker=Counter, topology=Topology(ParallelSpec()))}
    groups = ray_executor.build_groups(pool, specs, fused=True)
    groups |= ray_executor.build_groups(pool, {"alone": specs["two"]})
    groups |= ray_executor.build_groups(other, bystander)
    assert groups["bystander"].add(5).result() == [5.0]
    # The process that asks others how they are starts with the first question, and stays.
    ray_executor.describe(groups["bystander"])
    assert groups["one"].add(1).result() == [12.0] * 2
    assert groups["alone"].add(1).result() == [22.0] * 2
    for how in ("die", "raise", "stand still"):
        before = measure_footprint()
        hurt(groups["one"], how)
        old = groups["one"]
        groups |= rebuild(ray_executor, [pool])
        with pytest.raises(PoolError, match="released"):
            old.pid()
        assert groups["one"].pid().result() == groups["two"].pid().result() != groups["alone"].pid().result()
        assert groups["one"].add(1).result() == [12.0] * 2
        assert groups["alone"].add(1).result() == [22.0] * 2
        wait_until_no_larger(before)
    assert groups["bystander"].add(1).result() == [6.0]
    ray_executor.release(other)
    ray_executor.release(pool)
    with pytest.raises(PoolError, match="no group is on pool 'hurt'"):
        rebuild(ray_executor, [pool])


def test_in_process_groups_that_are_not_fused_are_rebuilt_apart():
    class Rigid(Worker):
        needs_process_group = False

        @classmethod
        def one_layout_per_process(cls, kwargs):
            return True

        @register(protocol=ONE_TO_ALL, returns="object")
        def draw(self):
            return torch.rand(1).item()

    pool = ResourcePool([2], device="cpu")
    specs = {
        "one": WorkerSpec(worker=Rigid, topology=Topology(ParallelSpec(dp_size=2)), seed=1),
        "two": WorkerSpec(worker=Rigid, topology=Topology(ParallelSpec(tp_size=2)), seed=2),
    }
    with InProcessExecutor() as executor:
        drawn = []
        groups = executor.build_groups(pool, specs)
        for _ in range(2):
            assert executor.built_on(pool) == [{"one": specs["one"]}, {"two": specs["two"]}]
            drawn.append([groups[role].draw().result() for role in ("one", "two")])
            groups = rebuild(executor, [pool])
        assert drawn[0] == drawn[1]


def test_in_process_groups_are_built_again():
    pool = ResourcePool([1], device="cpu")
    spec = WorkerSpec(worker=Counter, topology=Topology(ParallelSpec()))
    with InProcessExecutor() as executor:
        old = executor.build_groups(pool, {"one": spec, "two": spec}, fused=True)
        assert old["one"].add(2).result() == [2.0]
        with pytest.raises(WorkerError, match="KeyError"):
            old["two"].fail().result()
        new = rebuild(executor, [pool])
        assert set(new) == {"one", "two"}
        assert new["one"].add(2).result() == [2.0]
        with pytest.raises(PoolError, match="released"):
            old["one"].add(2)


def test_pools_with_the_same_role_are_not_rebuilt_together():
    pools = [ResourcePool([1], device="cpu", name=name) for name in ("first", "second")]
    spec = WorkerSpec(worker=Counter, topology=Topology(ParallelSpec()))
    with InProcessExecutor() as executor:
        old = [executor.build_groups(pool, {"one": spec})["one"] for pool in pools]
        with pytest.raises(PoolError, match=r"pools 'first', 'second' have a group one, .*\. Rebuild .* one by one"):
            rebuild(executor, pools)
        assert [group.add(2).result() for group in old] == [[2.0], [2.0]]
        assert set(rebuild(executor, pools[1:])) == {"one"}
