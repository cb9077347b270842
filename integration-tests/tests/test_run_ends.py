"""However a run on Ray ends, its processes and shared memory go with it, and what it wrote is complete."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from small_runs import Outcome, read_metrics, without_times

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REWARD = """
from pathlib import Path

def fails_later(prompts, responses, answers):
    if Path(__file__).with_name("server_is_gone").exists():
        raise RuntimeError("the reward's server is gone")
    return [len(response) / 5 for response in responses]
"""
# A model and a batch that the mapper finds worth two ranks.
ON_RAY = {
    "run.executor": "ray",
    "cluster.gpus_per_machine": 2,
    "rollout.batch_size": 256,
    "model.hidden_size": 64,
    "model.num_heads": 2,
}


def on_two_ranks(config: Path) -> list[str]:
    """The command that runs `config` on a local Ray cluster with a plan of two ranks."""
    reward = "small_runs:response_length"
    (config.parent / "rewards_of_this_run.py").write_text(REWARD)
    (config.parent / "small_runs.py").write_text(Path(sys.modules["small_runs"].__file__ or "").read_text())
    command = [str(Path(sys.executable).with_name("hybridflow")), "train", str(config)]
    overrides = {**ON_RAY, "reward.function": reward}
    return [*command, *(word for key, value in overrides.items() for word in ("--set", f"{key}={value}"))]


@contextmanager
def started(command: list[str]) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The program and its lines of output so far; killed at the end if it still runs."""
    lines: list[str] = []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    # A shell's background job, as these tests may be, ignores Ctrl-C; a user's program does not.
    hear_ctrl_c = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, text=True, start_new_session=True, preexec_fn=hear_ctrl_c, **pipes) as program:
        reader = threading.Thread(target=lambda: lines.extend(iter(program.stdout.readline, "")), daemon=True)
        reader.start()
        try:
            yield program, lines
        finally:
            program.kill()


def wait_for_iteration(program: subprocess.Popen[str], lines: list[str], number: int) -> list[psutil.Process]:
    """Wait until an iteration is reported; the processes of the program then."""
    deadline_s = time.monotonic() + 300
    while not any(line.startswith("iteration") and f" {number}/" in line for line in lines):
        assert program.poll() is None, "".join(lines)
        assert time.monotonic() < deadline_s, "".join(lines)
        time.sleep(0.1)
    root = psutil.Process(program.pid)
    return [root, *root.children(recursive=True)]


def wait_until_gone(processes: list[psutil.Process], within_s: float) -> None:
    deadline_s = time.monotonic() + within_s
    while left := [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.1)


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def wait_for_shared_memory(before: set[str]) -> None:
    """Waits until nothing is left; segments of tests that run at the same time go by themselves."""
    deadline_s = time.monotonic() + 30.0
    while left := shared_memory() - before:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("sent", "exit_code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.matrix),  # as a terminal does; test_ray_ends.py has it too
        (signal.SIGTERM, 143),  # as timeout does; `kill` is less, and test_ray_ends.py has it
    ],
)
def test_a_signal_ends_the_run_and_all_its_processes(small_config: Path, sent: signal.Signals, exit_code: int) -> None:
    before = shared_memory()
    with started([*on_two_ranks(small_config), "--set", "run.iterations=1000"]) as (program, lines):
        processes = wait_for_iteration(program, lines, 2)
        assert len(processes) > 4
        os.killpg(program.pid, sent)
        assert program.wait(timeout=100) == exit_code, "".join(lines)
        wait_until_gone(processes, within_s=30)
    wait_for_shared_memory(before)
    run = small_config.parent / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert len(read_metrics(run)) == summary["iterations"] >= 2
    json.loads((run / "trace.json").read_text())


def test_an_exception_in_a_worker_ends_the_run_with_its_message(small_config: Path) -> None:
    before = shared_memory()
    command = [*on_two_ranks(small_config), "--set", "reward.function=rewards_of_this_run:fails_later"]
    with started([*command, "--set", "run.iterations=1000"]) as (program, lines):
        processes = wait_for_iteration(program, lines, 2)
        (small_config.parent / "server_is_gone").touch()
        assert program.wait(timeout=60) == 1, "".join(lines)
        wait_until_gone(processes, within_s=30)
    text = "".join(lines)
    (message,) = [line for line in lines if line.startswith("Error: ")]
    assert "raised RuntimeError: the reward's server is gone" in message, text
    assert "Traceback" not in text
    assert "(reward.compute_reward on rank 0)" in text
    wait_for_shared_memory(before)


def test_a_killed_worker_ends_the_run_and_is_named(small_config: Path) -> None:
    before = shared_memory()
    command = [*on_two_ranks(small_config), "--set", "run.iterations=1000", "--set", "run.max_restarts=0"]
    with started(command) as (program, lines):
        processes = wait_for_iteration(program, lines, 2)
        workers = [each for each in processes if "RankActor" in " ".join(each.cmdline())]
        assert len(workers) == 3
        workers[0].kill()
        assert program.wait(timeout=60) == 1, "".join(lines)
        wait_until_gone(processes, within_s=30)
    (message,) = [line for line in lines if line.startswith("Error: ")]
    assert re.search(r"process (actor\+critic\+reference/[01]|reward\+advantage/0) is gone", message), message
    wait_for_shared_memory(before)


def test_a_killed_run_leaves_nothing_behind(small_config: Path) -> None:
    before = shared_memory()
    with started([*on_two_ranks(small_config), "--set", "run.iterations=1000"]) as (program, lines):
        processes = wait_for_iteration(program, lines, 2)
        program.kill()
        program.wait(timeout=10)
        wait_until_gone(processes, within_s=90)
    wait_for_shared_memory(before)


def test_two_runs_on_two_ranks_give_the_same_metrics(
    small_config: Path, hybridflow: Callable[..., Outcome], cluster_address: str
) -> None:
    changes = {**ON_RAY, "cluster.address": cluster_address}
    overrides = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    metrics = []
    for name in ("one", "two"):
        run = small_config.parent / name
        changed = ("--set", f"run.output_dir={run}", "--set", "run.iterations=4")
        ended = hybridflow("train", small_config, *overrides, *changed)
        assert ended.exit_code == 0, ended.errors
        metrics.append(without_times(read_metrics(run)))
        assert json.loads((run / "plan.json").read_text())["models"]["actor"]["train"]["dp_size"] == 2
    assert metrics[0] == metrics[1]
    assert len(metrics[0]) == 4
