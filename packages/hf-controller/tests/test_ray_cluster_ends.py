"""A run's own cluster that ends, and a program that is stopped for a while."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import sys, time
from pathlib import Path
from hf_protocols import ONE_TO_ALL, ParallelSpec, Topology, register
from hf_controller import Deadline, RayExecutor, ResourcePool, Worker, WorkerSpec

class Sleeper(Worker):
    needs_process_group = False

    @register(protocol=ONE_TO_ALL, returns="object")
    def sleep(self, seconds, mark):
        Path(mark).touch()
        time.sleep(seconds)

with RayExecutor(num_cpus=1, object_store_bytes=100 * 2**20) as executor:
    spec = WorkerSpec(worker=Sleeper, topology=Topology(ParallelSpec()))
    group = executor.build_groups(ResourcePool([1], device="cpu"), {"sleeper": spec})["sleeper"]
    with executor.deadline(Deadline(20.0, "deadlines.train_s")):
        called = group.sleep(float(sys.argv[1]), sys.argv[2])
    called.result()
print("closed", flush=True)
"""

STARTING = """
from hf_protocols import ONE_TO_ALL, ParallelSpec, Topology, register
from hf_controller import RayExecutor, ResourcePool, Worker, WorkerSpec

class Waiting(Worker):
    needs_process_group = False

    @register(protocol=ONE_TO_ALL, returns="object")
    def wait(self):
        pass

with RayExecutor(num_cpus=1, object_store_bytes=100 * 2**20, start_timeout_s=8.0) as executor:
    print("joined", flush=True)
    input()
    spec = WorkerSpec(worker=Waiting, topology=Topology(ParallelSpec()))
    executor.build_groups(ResourcePool([1], device="cpu"), {"waiting": spec})
"""


def start(seconds: float, mark: Path) -> subprocess.Popen[str]:
    """The program, whose worker sleeps by then."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", PROGRAM, str(seconds), str(mark)]
    program = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
    until_s = time.monotonic() + 120.0
    while not mark.exists():
        if program.poll() is not None or time.monotonic() > until_s:
            program.kill()
            raise AssertionError(program.communicate())
        time.sleep(0.05)
    return program


def find_children(pid: int, name: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "stat").read_text()
        except OSError:
            continue
        command, _, rest = text.partition("(")[2].rpartition(")")
        if command == name and int(rest.split()[1]) == pid:
            found.append(int(folder.name))
    return found


@pytest.mark.parametrize(("process", "called"), [("gcs_server", "GCS"), ("raylet", "raylet")])
def test_a_cluster_that_ends_is_one_error_and_leaves_nothing(process, called, tmp_path):
    program = start(600, tmp_path / "asleep")
    try:
        (victim,) = find_children(program.pid, process)
        others = [*find_children(program.pid, "gcs_server"), *find_children(program.pid, "raylet")]
        os.kill(victim, signal.SIGKILL)
        _, errors = program.communicate(timeout=50)  # Ray itself would wait for 60 s
    finally:
        program.kill()
        program.communicate()
    assert program.returncode == 1
    raised = [line for line in errors.splitlines() if "LostClusterError: " in line]
    assert len(raised) == 1, errors
    told = f"the local Ray cluster is lost: its {called}, process {victim}, is gone: signal 9 (SIGKILL)"
    assert told in raised[0]
    until_s = time.monotonic() + 60.0
    while any(Path(f"/proc/{pid}").exists() for pid in others):
        assert time.monotonic() < until_s
        time.sleep(0.1)


@pytest.mark.parametrize(("process", "called"), [("gcs_server", "GCS"), ("raylet", "raylet")])
def test_a_stopped_cluster_is_named_and_ends_with_its_program(process, called, tmp_path):
    """The deadline of the call passes, and leaving the cluster does not wait for the stopped process."""
    program = start(600, tmp_path / "asleep")
    try:
        (victim,) = find_children(program.pid, process)
        os.kill(victim, signal.SIGSTOP)
        _, errors = program.communicate(timeout=120)
    finally:
        program.kill()
        program.communicate()
    assert program.returncode == 1
    (raised,) = (line for line in errors.splitlines() if "WorkerTimeoutError: " in line)
    assert f"The {called} of the cluster was stopped, as by SIGSTOP." in errors, raised
    assert not Path(f"/proc/{victim}").exists()


@pytest.mark.parametrize(("process", "called"), [("gcs_server", "GCS"), ("raylet", "raylet")])
def test_a_start_on_a_stopped_cluster_has_its_deadline(process, called):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    program = subprocess.Popen([sys.executable, "-c", STARTING], text=True, start_new_session=True, **pipes)
    try:
        assert program.stdout.readline() == "joined\n"
        (victim,) = find_children(program.pid, process)
        os.kill(victim, signal.SIGSTOP)
        _, errors = program.communicate("go on\n", timeout=120)
    finally:
        program.kill()
        program.communicate()
    assert program.returncode == 1
    (raised,) = (line for line in errors.splitlines() if "WorkerTimeoutError: " in line)
    wanted = f"waiting.__init__ is not done after 8 s (start_timeout_s): the {called} of the cluster was stopped, as by"
    assert wanted in raised
    assert not Path(f"/proc/{victim}").exists()


def test_a_program_that_was_stopped_goes_on(tmp_path):
    """For longer than the deadline of its call, which takes less than that afterwards, and than Ray's own patience."""
    program = start(40.0, tmp_path / "asleep")
    try:
        os.kill(program.pid, signal.SIGSTOP)
        time.sleep(35.0)
        os.kill(program.pid, signal.SIGCONT)
        output, errors = program.communicate(timeout=100)
    finally:
        program.kill()
        program.communicate()
    assert (program.returncode, output) == (0, "closed\n"), errors
