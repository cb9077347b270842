"""Starts of a local cluster that Ray gives up: on a busy machine its processes wait too shortly for each other."""

from __future__ import annotations

import os
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


def start(monkeypatch: pytest.MonkeyPatch, *errors: Exception | None) -> tuple[list[str], Cluster | None, str]:
    """Returns what Ray was asked, the cluster, and why there is none; `errors` are those of Ray's starts in turn."""
    asked: list[str] = []
    left = iter(errors)

    def init(**options: Any) -> None:
        asked.append("init")
        if error := next(left):
            raise error

    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: asked.append("shutdown"))
    monkeypatch.setattr(cluster, "Watchdog", NoWatchdog)
    try:
        made = Cluster(address="local", num_cpus=1, object_store_bytes=100 * 2**20, log_to_driver=False)
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
