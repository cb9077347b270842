from __future__ import annotations

import os
import subprocess
import sys

import pytest
import ray._private.worker as ray_worker

from hf_controller.executors.ray.terminal import drop_ray_lines, quiet_ray, without_quiet

RAYS = "[2026-11-25 03:51:59,932 E 20976 20976] core_worker_process.cc:842: Failed to establish connection to the agent"


@pytest.mark.parametrize("pid", ["raylet", "gcs_server", "autoscaler", "runtime_env", None, ""])
def test_lines_of_rays_processes_are_dropped(pid):
    assert drop_ray_lines({"pid": pid, "lines": ["[file_system_monitor] /tmp is full"]})["lines"] == []


def test_lines_of_workers_are_kept_without_rays():
    ours = ["[actor/0] loss is high", "[2026-11-25] a date", "plain", ""]
    data = {"pid": 4242, "is_err": True, "lines": [ours[0], RAYS, *ours[1:]]}
    assert drop_ray_lines(data) == {**data, "lines": ours}


def test_ray_prints_only_lines_of_workers(monkeypatch, capsys):
    """As its threads do: of logs, and of errors that it publishes itself."""
    monkeypatch.setattr(ray_worker, "print_to_stdstream", ray_worker.print_to_stdstream)
    monkeypatch.setenv("RAY_COLOR_PREFIX", "0")
    with quiet_ray(), quiet_ray():
        pass
    lines = {"ip": "1", "localhost": "1", "is_err": True}
    for pid, text in (("raylet", "one agent failed"), (77, "a worker's line"), (77, RAYS)):
        ray_worker.print_to_stdstream({**lines, "pid": pid, "lines": [text]}, ignore_prefix=False)
    output = "".join(capsys.readouterr())
    assert "a worker's line" in output
    assert "agent" not in output


PROGRAM = f"""
import os, sys
from hf_controller.executors.ray.terminal import quiet_ray
try:
    with quiet_ray():
        os.write(2, b"before\\n{RAYS}\\n")
        print("python's own", file=sys.stderr)
        print(os.environ["RAY_BACKEND_LOG_LEVEL"])
        raise ValueError("as it is")
finally:
    print("RAY_BACKEND_LOG_LEVEL" in os.environ)
"""


@pytest.mark.parametrize("level", [None, "info"])
def test_other_lines_of_standard_error_are_kept(level):
    environment = {name: value for name, value in os.environ.items() if name != "RAY_BACKEND_LOG_LEVEL"}
    environment |= {"RAY_BACKEND_LOG_LEVEL": level} if level else {}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, env=environment)
    shown = ["before", RAYS, "python's own"] if level else ["before", "python's own"]
    assert done.stderr.splitlines()[: len(shown)] == shown
    assert done.stderr.splitlines()[-1] == "ValueError: as it is"
    assert done.stdout.split() == ([level, "True"] if level else ["fatal", "False"])


def test_rays_processes_log_as_always():
    assert without_quiet({"A": "1", "RAY_BACKEND_LOG_LEVEL": "fatal"}) == {"A": "1"}
    assert without_quiet({"RAY_BACKEND_LOG_LEVEL": "debug"}) == {"RAY_BACKEND_LOG_LEVEL": "debug"}
