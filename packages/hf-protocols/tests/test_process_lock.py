"""A lock of a process: one thread at a time, again on the same thread, and free in a forked process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hf_protocols.process_lock import ProcessLock


def held_elsewhere(lock: ProcessLock, timeout_s: float) -> str | None:
    """Has another thread ask for the lock: returns the error with which it is refused, or None."""
    found: list[str | None] = []

    def ask() -> None:
        try:
            with lock.held(timeout_s):
                found.append(None)
        except KeyError as error:
            found.append(str(error.args[0]))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(20)
    return found[0]


@pytest.fixture
def lock() -> ProcessLock:
    return ProcessLock(KeyError, "busy after {timeout_s} s")


def test_one_thread_holds_it_and_may_take_it_again(lock):
    with lock.held(0):
        with lock.held(0):
            assert held_elsewhere(lock, 0.01) == "busy after 0.01 s"
        assert held_elsewhere(lock, 0) == "busy after 0 s"
    assert held_elsewhere(lock, 0) is None


def test_an_error_in_the_block_frees_it(lock):
    with pytest.raises(ValueError, match="broken"), lock.held():
        raise ValueError("broken")
    assert held_elsewhere(lock, 0) is None


@contextmanager
def held_by_a_thread(lock: ProcessLock) -> Iterator[threading.Event]:
    """Yields an event at which another thread, which holds the lock, frees it; at the latest when the block ends."""
    is_held, may_free = threading.Event(), threading.Event()

    def hold() -> None:
        with lock.held():
            is_held.set()
            assert may_free.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert is_held.wait(20)
        yield may_free
    finally:
        may_free.set()
        thread.join(20)


def test_another_thread_waits_for_it(lock):
    with held_by_a_thread(lock) as may_free:
        threading.Timer(0.05, may_free.set).start()
        with lock.held(20):
            assert may_free.is_set()


def test_a_forked_process_finds_it_free(lock):
    """Also while another thread of its parent holds it."""
    with held_by_a_thread(lock):
        child = os.fork()
        if not child:
            try:
                with lock.held(0):
                    pass
            except KeyError:
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
