from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import pytest

from hf_controller.executors.ray import watchdog
from hf_controller.executors.ray.watchdog import Watchdog, find_sessions

HOLDER = "import sys, time; file = open(sys.argv[1], 'w'); print('holds', flush=True); time.sleep(600)"
PROGRAM = """
import os, sys
from hf_controller.executors.ray.watchdog import Watchdog, _name_of_now
watchdog = Watchdog(sys.argv[1])
session = f"{_name_of_now()}_{os.getpid()}"
os.makedirs(f"{sys.argv[1]}/{session}/logs")
os.symlink(f"{sys.argv[1]}/{session}", f"{sys.argv[1]}/session_latest")
print(session, flush=True)
sys.stdin.readline()
how = sys.argv[2]
if how == "abort":
    os.abort()
if how == "abort with a forked child" and os.fork() == 0:
    print(os.getpid(), flush=True)
    os.close(1), os.close(2)
    __import__("time").sleep(600)
if how.startswith("abort"):
    sys.stdin.readline()
    os.abort()
watchdog.dismiss(keeps_logs=how == "keep")
"""


def hold(path):
    """A process with a file open."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "holds\n"
    return holder


def wait_until(what):
    deadline_s = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.parametrize("how", ["abort", "abort with a forked child"])
def test_watchdog_ends_the_cluster_of_a_program_that_aborts(tmp_path, how):
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path), how], text=True, **pipes)
    session = tmp_path / program.stdout.readline().strip()
    earlier = tmp_path / f"session_2020-01-01_00-00-00_000000_{program.pid}"
    earlier.mkdir()
    foreign = tmp_path / f"{session.name}1"
    foreign.mkdir()
    ours, others = hold(session / "logs" / "raylet.out"), [hold(earlier / "log"), hold(foreign / "log")]
    child = 0
    try:
        program.stdin.write("\n")
        program.stdin.flush()
        if "child" in how:
            child = int(program.stdout.readline())
            program.stdin.write("\n")
            program.stdin.flush()
        assert program.wait(timeout=60) < 0
        ours.wait(timeout=60)
        wait_until(lambda: not session.exists() and not (tmp_path / "session_latest").is_symlink())
        assert [each.poll() for each in others] == [None, None]
        assert earlier.is_dir() and foreign.is_dir()
    finally:
        for each in (ours, *others):
            each.kill()
            each.communicate()
        program.communicate()
        if child:
            os.kill(child, 9)


@pytest.mark.parametrize("how", ["close", "keep"])
def test_watchdog_removes_the_folder_of_a_closed_cluster(tmp_path, how):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), how]
    done = subprocess.run(command, input="\n", capture_output=True, text=True, timeout=60, check=True)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == ({done.stdout.strip(), "session_latest"} if how == "keep" else set())


def test_watchdog_leaves_the_link_to_a_later_cluster(tmp_path):
    watchdog = Watchdog(str(tmp_path))
    session = tmp_path / f"session_2999-01-01_00-00-00_000000_{os.getpid()}"
    later = tmp_path / "session_2999-01-01_00-00-01_000000_1"
    for folder in (session, later):
        folder.mkdir()
    (tmp_path / "session_latest").symlink_to(later)
    assert watchdog.find_sessions() == [str(session)]
    watchdog.dismiss()
    assert {path.name for path in tmp_path.iterdir()} == {later.name, "session_latest"}


def test_watchdog_without_a_folder_finds_nothing(tmp_path):
    assert find_sessions(str(tmp_path / "absent"), 1, "session_2020") == []


def test_a_folder_that_is_written_to_as_it_goes_is_removed(tmp_path, monkeypatch):
    """As by a process of the cluster that ends a moment later."""
    session = tmp_path / f"session_2026-01-01_00-00-00_000000_{os.getpid()}"
    session.mkdir()
    remove, removed = shutil.rmtree, []

    def write_once_more(path, ignore_errors):
        remove(path, ignore_errors=ignore_errors)
        removed.append(path)
        if len(removed) == 1:
            session.mkdir()

    monkeypatch.setattr(shutil, "rmtree", write_once_more)
    watchdog._end(str(tmp_path), os.getpid(), "session_2025", kills=False)
    assert removed == [str(session)] * 2 and not session.exists()
