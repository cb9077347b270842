"""Several in-process executors in one process: nested, next to each other, and on threads of their own."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from hf_controller import InProcessExecutor, ResourcePool, Worker, WorkerSpec
from hf_controller.signals import SignalGuard
from hf_protocols import ONE_TO_ALL, ParallelSpec, Topology, WorkerTimeoutError, register

NUM_DRAWS = 30

pytestmark = pytest.mark.usefixtures("other_guards_hear_nothing")


class DrawingWorker(Worker):
    """Draws from every global generator, in steps between which other threads run."""

    @register(protocol=ONE_TO_ALL, returns="object")
    def draw(self):
        drawn = []
        for _ in range(NUM_DRAWS):
            drawn.append((random.random(), float(torch.rand(())), float(np.random.rand())))
            drawn.append(str(torch.get_default_dtype()))
            time.sleep(0.001)
        return drawn

    @register(protocol=ONE_TO_ALL, returns="object")
    def set_dtype(self):
        torch.set_default_dtype(torch.float64)

    @register(protocol=ONE_TO_ALL, returns="object")
    def wait_for(self, name):
        EVENTS[name][0].set()
        assert EVENTS[name][1].wait(20)


EVENTS = {name: (threading.Event(), threading.Event()) for name in ("call", "build", "close", "error")}


def build(executor, seed=3):
    spec = WorkerSpec(worker=DrawingWorker, topology=Topology(ParallelSpec()), seed=seed)
    return executor.build_groups(ResourcePool([1], device="cpu"), {"drawing": spec})["drawing"]


def draw_alone(seed, *, in_float64):
    with InProcessExecutor() as executor:
        group = build(executor, seed)
        if in_float64:
            group.set_dtype().result()
        return [group.draw().result() for _ in range(2)]


def run_threads(*functions):
    """Results of functions that run at the same time."""
    results = [None] * len(functions)

    def keep(index, function):
        results[index] = function()

    threads = [threading.Thread(target=keep, args=each) for each in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def test_executors_on_two_threads_draw_what_each_draws_alone():
    first, second = (lambda: draw_alone(3, in_float64=False)), (lambda: draw_alone(4, in_float64=True))
    expected = [first(), second()]
    assert expected[0][0] != expected[0][1]
    assert expected[1][0][0][1] == "torch.float64"
    assert run_threads(first, second) == expected


@pytest.mark.parametrize("what", ["call", "build", "close"])
def test_another_threads_call_is_waited_for_with_a_deadline(what):
    started, may_end = EVENTS[what]
    with InProcessExecutor() as busy, InProcessExecutor() as waiting:
        group = build(busy)
        other = None if what == "build" else build(waiting)
        thread = threading.Thread(target=lambda: group.wait_for(what).result())
        thread.start()
        assert started.wait(20)
        waiting.call_timeout_s = 0.05
        actions = {"call": lambda: other.draw(), "build": lambda: build(waiting), "close": waiting.close}
        with pytest.raises(
            WorkerTimeoutError, match=r"was not over after 0.05 s, or it waits.*Wait for its end, or use"
        ):
            actions[what]()
        may_end.set()
        thread.join(20)
        waiting.call_timeout_s = 20.0
        assert (other or build(waiting)).draw().result()  # nothing was lost, not even by a close that gave up


def test_an_error_stays_where_closing_waits_in_vain():
    started, may_end = EVENTS["error"]
    with InProcessExecutor() as busy:
        group = build(busy)
        thread = threading.Thread(target=lambda: group.wait_for("error").result())
        before = hooks()

        def fail() -> None:
            with InProcessExecutor() as waiting:
                waiting.call_timeout_s = 0.05
                thread.start()
                assert started.wait(20)
                raise KeyError("lost")

        with pytest.raises(KeyError, match="lost") as raised:
            fail()
        assert raised.value.__notes__[0].startswith("the executor was not closed: another thread's call of an in-pr")
        assert hooks() == before
        may_end.set()
        thread.join(20)


def test_executors_close_in_any_order():
    """In a process of its own, where no other test's executor uses the group."""
    script = """
from torch import distributed
from hf_protocols import ONE_TO_ALL, ParallelSpec, Topology, register
from hf_controller import InProcessExecutor, ResourcePool, Worker, WorkerSpec

class Plain(Worker):
    @register(protocol=ONE_TO_ALL, returns="object")
    def world(self):
        return distributed.get_world_size()

def build(executor):
    spec = WorkerSpec(worker=Plain, topology=Topology(ParallelSpec()))
    return executor.build_groups(ResourcePool([1], device="cpu"), {"plain": spec})["plain"]

first, second, third = (InProcessExecutor() for _ in range(3))
groups = [build(each) for each in (first, second)]
first.close()
groups.append(build(third))
print([each.world().result() for each in groups[1:]])
second.close()
print(groups[2].world().result(), distributed.is_initialized())
third.close()
print(distributed.is_initialized())

# One that the program destroys, and one that it makes, are the program's own.
first = InProcessExecutor()
build(first)
distributed.destroy_process_group()
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
with InProcessExecutor() as second:
    print(build(second).world().result())
first.close()
print(distributed.is_initialized())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["[[1], [1]]", "[1] True", "False", "[1]", "True"], done.stderr


def hooks():
    return signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP), sys.unraisablehook


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_handlers_are_restored_in_any_order(order):
    before = hooks()
    executors = [InProcessExecutor() for _ in range(3)]
    for index in order:
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)
        executors[index].close()
    assert hooks() == before


def test_a_handler_that_the_program_set_meanwhile_stays():
    def own(kind, frame):
        raise ValueError("the program's")

    before = signal.getsignal(signal.SIGTERM)
    first, second = InProcessExecutor(), InProcessExecutor()
    second.close()
    signal.signal(signal.SIGTERM, own)
    first.close()
    assert signal.signal(signal.SIGTERM, before) is own


def test_every_guard_hears_a_signal():
    """A wait of the first one ends, although the second one has the handler and the wait swallows its exception."""
    first, second = SignalGuard(), SignalGuard()
    first.install()
    second.install()
    try:
        with pytest.raises(SystemExit) as end, first.watching(), contextlib.suppress(SystemExit):
            signal.raise_signal(signal.SIGTERM)
        assert end.value.code == 143
    finally:
        first.restore()
        second.restore()
