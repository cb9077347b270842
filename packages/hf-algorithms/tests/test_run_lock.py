"""One run at a time writes into a directory, and a dead one leaves it to the next."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_algorithms import train
from hf_algorithms.run_directory import RunDirectory
from hf_algorithms.run_lock import RunLock, check_unlocked, training_alone
from hf_protocols import ConfigError


def test_a_second_run_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    waiting = RunDirectory(tmp_path / "run")
    first = RunDirectory(tmp_path / "run")
    first.begin()
    first.begin()  # as quickstart does
    holder = json.loads((tmp_path / "run" / ".lock").read_text())
    assert holder["pid"] == os.getpid() and holder.keys() == {"host", "pid", "start_time"}
    message = rf"^run\.output_dir=.*: a run of process {os.getpid()} on .* that started .* writes there\. Wait"
    with pytest.raises(ConfigError, match=message):
        RunDirectory(tmp_path / "run", overwrite=True)
    with pytest.raises(ConfigError, match=message):
        waiting.begin()
    assert not waiting.has_begun
    first.close()
    RunDirectory(tmp_path / "run", overwrite=True).begin()


def test_a_lock_of_a_killed_owner_is_taken_over(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from hf_algorithms.run_lock import RunLock\n"
        "lock = RunLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"a run of process {owner.pid} on "):
            check_unlocked(tmp_path)
        owner.send_signal(signal.SIGKILL)
        owner.wait(timeout=60)
    check_unlocked(tmp_path)
    RunLock(tmp_path).release()


def test_a_lock_without_a_readable_holder_is_one_line(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    for text in ("", "[]", '{"pid": "x", "host": 1, "start_time": 1e300}', "\0", "[" * 9000):
        (tmp_path / ".lock").write_text(text)
        with pytest.raises(ConfigError, match="another run writes there"):
            check_unlocked(tmp_path)
    lock.release()


def refused_on_another_thread(block: Callable[[], object]) -> list[str]:
    """Errors of a block on a thread of its own, which is waited for."""
    found = []

    def run() -> None:
        try:
            block()
        except ConfigError as error:
            found.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return found


def test_one_thread_of_a_process_trains(tmp_path: Path) -> None:
    def start_training() -> None:
        train(model=tmp_path / "absent", output_dir=tmp_path / "run")

    def enter() -> None:
        with training_alone():
            pass

    with training_alone(), training_alone():
        for block in (enter, start_training):
            (reason,) = refused_on_another_thread(block)
            assert reason.startswith("another thread of this process is training, and random numbers")
            assert reason.endswith("Train after it ends, or in a process of its own")
        with pytest.raises(ConfigError, match="data"):  # on this thread it is checked
            start_training()
    assert refused_on_another_thread(enter) == []
    assert not (tmp_path / "run").exists()
