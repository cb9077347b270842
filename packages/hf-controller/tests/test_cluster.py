"""Starts of a local cluster that Ray gives up: on a busy machine its processes wait too shortly for each other."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from hf_controller.executors.ray import cluster
from hf_controller.executors.ray.cluster import Cluster
from hf_protocols import PoolError


class NoWatchdog:
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def find_sessions(self) -> list[str]:
        return []

    def dismiss(self, *, keeps_logs: bool) -> None:
        pass


def without_ray(monkeypatch: pytest.MonkeyPatch, init: Callable[..., None], shutdown: Callable[[], None]) -> None:
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.setattr(cluster.ray, "shutdown", shutdown)
    monkeypatch.setattr(cluster, "Watchdog", NoWatchdog)


def make_cluster() -> Cluster:
    return Cluster(address="local", num_cpus=1, object_store_bytes=100 * 2**20, log_to_driver=False)


def start(monkeypatch: pytest.MonkeyPatch, *errors: Exception | None) -> tuple[list[str], Cluster | None, str]:
    """Returns what Ray was asked, the cluster, and why there is none; `errors` are those of Ray's starts in turn."""
    asked: list[str] = []
    left = iter(errors)

    def init(**options: Any) -> None:
        asked.append("init")
        if error := next(left):
            raise error

    without_ray(monkeypatch, init, lambda: asked.append("shutdown"))
    try:
        made = make_cluster()
    except PoolError as error:
        return asked, None, str(error)
    made.stop()
    return asked, made, ""


def test_a_start_that_ray_gives_up_is_tried_once_more(monkeypatch):
    asked, made, _ = start(monkeypatch, RuntimeError("the raylet timed out"), None)
    assert asked == ["init", "shutdown", "init", "shutdown"]
    assert made is not None


def test_the_second_failed_start_is_an_error(monkeypatch):
    asked, _, reason = start(monkeypatch, RuntimeError("slow"), RuntimeError("the raylet timed out"))
    assert asked.count("init") == 2 and asked[-1] == "shutdown"
    assert "the local Ray cluster did not start: RuntimeError: the raylet timed out" in reason


def test_a_size_that_ray_refuses_is_not_tried_again(monkeypatch):
    asked, _, reason = start(monkeypatch, ValueError("too small"))
    assert asked.count("init") == 1 and asked[-1] == "shutdown"
    assert "the local Ray cluster did not start with" in reason and "too small" in reason


@pytest.mark.parametrize("given", [None, "4000"])
def test_a_user_sets_how_long_rays_processes_look_for_each_other(monkeypatch, given):
    interval, attempts = "RAY_raylet_client_connect_timeout_milliseconds", "RAY_raylet_client_num_connect_attempts"
    monkeypatch.delenv(attempts, raising=False)
    monkeypatch.delenv(interval, raising=False)
    if given:
        monkeypatch.setenv(interval, given)
    start(monkeypatch, None)
    assert os.environ[interval] == (given or "20")
    assert int(os.environ[interval]) * int(os.environ[attempts]) >= 10_000, "Ray's own looks take ten seconds in all"


def test_two_threads_do_not_start_ray_at_once(monkeypatch):
    begun, may_end, refusals = threading.Event(), threading.Event(), []

    def init(**options: Any) -> None:
        begun.set()
        assert may_end.wait(20)
        raise ValueError("enough")

    def make_refused() -> None:
        with pytest.raises(PoolError, match=r"did not start with .* enough"):
            make_cluster()
        refusals.append(threading.current_thread())

    without_ray(monkeypatch, init, lambda: None)
    thread = threading.Thread(target=make_refused)
    thread.start()
    assert begun.wait(20)
    with pytest.raises(
        PoolError, match=r"another thread of this process starts Ray.* Start one executor after the other"
    ):
        make_cluster()
    may_end.set()
    thread.join(20)
    make_refused()  # the first start is over
    assert refusals == [thread, threading.current_thread()]
