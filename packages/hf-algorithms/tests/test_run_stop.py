"""A run stops after an iteration, or drops it when its grace is over or a second signal comes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from hf_algorithms.config import RunConfig
from hf_algorithms.run.stop import RunStop
from hf_controller import Terminated

LONG_S = 60.0


@pytest.fixture(autouse=True)
def heard_signals() -> Iterator[None]:
    """A program that ignores SIGHUP, as under `nohup`, is not asked by it: these tests may run in one."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_run_that_nobody_stops_makes_all_iterations() -> None:
    stop, seen = RunStop(RunConfig(max_seconds=3600.0), time.monotonic()), []
    before = signal.getsignal(signal.SIGTERM)
    assert not stop.iterate(lambda number: seen.append((number, stop.decide())), 3, 5)
    assert seen == [(3, False), (4, False), (5, False)]
    stop.end()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGHUP])
def test_the_iteration_of_a_signal_is_finished(kind: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    stop, seen = RunStop(RunConfig(grace_s=LONG_S), time.monotonic()), []

    def iterate(number: int) -> None:
        if number == 2:
            os.kill(os.getpid(), kind)
        seen.append((number, stop.decide()))

    assert stop.iterate(iterate, 1, 9)
    assert seen == [(1, False), (2, True)]
    with pytest.raises(Terminated) as end:
        stop.end()
    assert end.value.code == 128 + kind
    assert (
        f"{kind.name}: the run stops after this iteration. If that takes longer than run.grace_s = 60 s"
        in capfd.readouterr().err
    )


@pytest.mark.parametrize("again", [False, True], ids=["its grace is over", "a second signal"])
def test_an_iteration_is_dropped_where(again: bool) -> None:
    stop = RunStop(RunConfig(grace_s=LONG_S if again else 0.01), time.monotonic())

    def iterate(number: int) -> None:
        for _ in range(1 + again):
            os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(LONG_S)
        raise AssertionError("nothing has ended the iteration")

    with pytest.raises(SystemExit) as end:
        stop.iterate(iterate, 1, 9)
    assert end.value.code == 129


def test_time_that_is_over_ends_a_run_with_code_0() -> None:
    stop, seen = RunStop(RunConfig(max_seconds=5.0), time.monotonic() - 6.0), []

    def iterate(number: int) -> None:
        deadline_s = time.monotonic() + LONG_S
        while stop.code is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        seen.append((number, stop.decide()))

    assert stop.iterate(iterate, 1, 9)
    assert seen == [(1, True)]
    stop.end()  # no error
    dropped = RunStop(RunConfig(max_seconds=5.0, grace_s=0.01), time.monotonic() - 6.0)
    with pytest.raises(SystemExit) as end:
        dropped.iterate(lambda number: time.sleep(LONG_S), 1, 9)
    assert end.value.code == 0


def test_an_earlier_signal_handler_does_not_change_the_exit_code() -> None:
    before = signal.signal(signal.SIGTERM, lambda kind, frame: sys.exit(128 + kind))  # as the command line has it
    try:
        stop = RunStop(RunConfig(max_seconds=5.0, grace_s=0.01), time.monotonic() - 6.0)
        with pytest.raises(SystemExit) as end:
            stop.iterate(lambda number: time.sleep(LONG_S), 1, 9)
        assert end.value.code == 0
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_stops_between_iterations_alone() -> None:
    stop = RunStop(RunConfig(max_seconds=5.0, grace_s=0.01), time.monotonic() - 6.0)
    seen: list[object] = []

    def iterate(number: int) -> None:
        deadline_s = time.monotonic() + LONG_S
        while stop.code is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        time.sleep(0.1)
        seen.append((number, stop.decide()))

    thread = threading.Thread(target=lambda: seen.append(stop.iterate(iterate, 1, 9)))
    thread.start()
    thread.join(2 * LONG_S)
    assert seen == [(1, True), True]
