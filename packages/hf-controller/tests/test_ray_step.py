"""The ranks of a group stay in step after one of them failed, or say that they are not."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from hf_controller import RayExecutor, ResourcePool, Worker, WorkerSpec, rebuild
from hf_controller.executors.ray.step import Progress, describe_progress
from hf_protocols import ONE_TO_ALL, ParallelSpec, Topology, WorkerError, WorkerTimeoutError, register


def call_from(*path):
    """A function that calls another one, as if it stood in a file of torch's."""
    names = {}
    exec(compile("def call(function): function()", os.sep + os.path.join("torch", *path), "exec"), names)
    return names["call"]


def observe(action, meanwhile=lambda: None):
    """What is said of a thread that runs ``action(wait)``, before and after something else."""
    event = threading.Event()
    thread = threading.Thread(target=action, args=(event.wait,))
    thread.start()
    time.sleep(0.2)
    before = describe_progress(thread.ident)
    meanwhile()
    after = describe_progress(thread.ident)
    event.set()
    thread.join()
    return before, after


def spend():
    until = time.process_time() + 1.1
    while time.process_time() < until:
        pass


COLLECTIVE = call_from("distributed", "distributed_c10d.py")


def wait_in_torch(event_wait):
    """The innermost frames are of threading.py, which the test cannot do without."""
    COLLECTIVE(event_wait)


def test_who_waits_in_a_collective_stands_still_unless_its_process_computes(monkeypatch):
    monkeypatch.setattr("hf_controller.executors.ray.step._DISPATCHER", os.sep + "threading.py")
    before, after = observe(wait_in_torch, lambda: time.sleep(0.2))
    assert before == after and not before.has_left and before.waits_at is not None
    before, after = observe(wait_in_torch, spend)
    assert None not in (before.waits_at, after.waits_at) and before != after


@pytest.mark.parametrize(
    "path", [("distributed", "fsdp", "forward.py"), ("distributed", "distributed_c10d.py"), ("nn", "module.py")]
)
def test_what_is_called_from_inside_of_torch_is_no_waiting(path):
    assert observe(lambda wait: call_from(*path)(wait)) == (Progress(False), Progress(False))


def test_a_slow_disk_under_a_checkpoint_is_no_waiting(monkeypatch):
    monkeypatch.setattr("hf_controller.executors.ray.step._DISPATCHER", os.sep + "threading.py")
    file = call_from("distributed", "checkpoint", "filesystem.py")
    assert observe(lambda wait: file(wait)) == (Progress(False), Progress(False))


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


def test_ranks_that_left_a_call_do_not_meet_those_that_are_in_it(ray_executor, pool, monkeypatch):
    """Rank 1 left a call in whose collective rank 0 waits: it would add its number to that one."""
    monkeypatch.setattr(ray_executor, "_collective_timeout_s", 100.0)  # it waits until its peers stand still
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
    knob = "Raise collective_timeout_s (of a run: cluster.call_timeout_s), or look at what the other ranks are at:"
    assert first.endswith(knob)
    assert any(line.startswith("rank 1: call ") and "members.meet: done, idle for " in line for line in rest)
    # Gloo closed the connection; nobody is late any more.
    with pytest.raises(
        WorkerError, match=r"timed out, in this call or in an earlier one, .*: rebuild\(executor, \[pool\]\)"
    ):
        group.meet().result(timeout_s=60)


class Getter(Member):
    @register(protocol=ONE_TO_ALL, returns="object")
    def get(self, ranks):
        if self.context.rank in ranks:
            raise KeyError("own")
        connection = self.context.connections["link"]
        found = torch.zeros(())
        torch.distributed.recv(found, src=connection.ranks["sender"][0], group=connection.group)
        return found.item()


class Sender(Worker):
    @register(protocol=ONE_TO_ALL, returns="object")
    def send(self, after_s):
        time.sleep(after_s)
        connection = self.context.connections["link"]
        torch.distributed.send(torch.tensor(7.0), dst=connection.ranks["members"][0], group=connection.group)


@pytest.mark.slow
def test_a_rank_that_waits_for_another_group_is_waited_for(ray_executor, pool, monkeypatch):
    """It stands still in torch.distributed, but not for the rank that failed."""
    monkeypatch.setattr(ray_executor, "_collective_timeout_s", 100.0)
    source = ResourcePool([1], device="cpu", name="source")
    members = WorkerSpec(worker=Getter, topology=Topology(ParallelSpec(dp_size=2)))
    group = ray_executor.build_groups(pool, {"members": members})["members"]
    sender = ray_executor.build_groups(source, {"sender": WorkerSpec(worker=Sender, topology=Topology(ParallelSpec()))})
    ray_executor.connect(group, sender["sender"], name="link")
    failed, after = group.get([1]), group.total(1.0)
    sent = sender["sender"].send(11.0)
    with pytest.raises(WorkerError, match=r"members\.get on rank 1 failed: KeyError: 'own'"):
        failed.result()
    assert after.result() == [2.0, 2.0]
    sent.result()
    ray_executor.release(source)


class Alone(Worker):
    @register(protocol=ONE_TO_ALL, returns="object")
    def meet(self):
        if self.context.rank == 0:
            torch.distributed.all_reduce(torch.ones(()))
