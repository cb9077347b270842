"""The internals of Ray that are used are those of the installed version."""

from __future__ import annotations

import inspect
import subprocess
import sys

import ray._private.ray_constants as constants
import ray._private.services as services
import ray._private.worker as worker
from ray.actor import ActorHandle

from hf_controller.executors.ray.ray_internals import (
    filter_printed,
    find_actor_id,
    start_workers_without_uv,
    starting_by,
)


class Handle:
    def __init__(self):
        self._actor_id = bytes([1, 255])


def test_a_handle_has_the_id_of_its_actor():
    assert isinstance(ActorHandle._actor_id, property)
    assert find_actor_id(Handle()) == "01ff"


def test_ray_starts_its_processes_by_one_class():
    assert issubclass(services.ConsolePopen, subprocess.Popen)
    assert "ConsolePopen(" in inspect.getsource(services.start_ray_process)


def test_processes_start_by_the_given_function_within_the_block():
    calls, popen = [], services.ConsolePopen

    def start(given, *arguments, **options):
        calls.append((given, arguments))
        return given(*arguments, **options)

    command = [sys.executable, "-c", ""]
    with starting_by(start):
        assert services.ConsolePopen(command).wait(60) == 0
    assert calls == [(popen, (command,))]
    assert services.ConsolePopen is popen


def test_ray_prints_by_one_function(monkeypatch):
    assert next(iter(inspect.signature(worker.print_to_stdstream).parameters)) == "data"
    monkeypatch.setattr(worker, "print_to_stdstream", printed := [].append)

    def wrap(printer):
        def wrapper(data):
            printer(data)

        wrapper.__wrapped__ = printer
        return wrapper

    for _ in range(2):
        filter_printed(wrap)
    worker.print_to_stdstream("a line")
    assert printed.__self__ == ["a line"], "wrapped once"


def test_a_constant_turns_the_hook_for_uv_off(monkeypatch):
    assert "RAY_ENABLE_UV_RUN_RUNTIME_ENV" in inspect.getsource(worker)
    monkeypatch.setattr(constants, "RAY_ENABLE_UV_RUN_RUNTIME_ENV", True)
    start_workers_without_uv()
    assert constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV is False
