"""Functions in processes of their own: deadlines, crashes, whole groups, and what is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from hf_algorithms.rewards import FunctionSpec, Samples, ScoringFunctions
from hf_protocols import RewardError

SOURCE = '''
import asyncio, os, re, subprocess, sys, time

def by_text(solution_str):
    """One call for each response."""
    if solution_str == "hang":
        re.match(r"(a+)+$", "a" * 60 + "b")  # holds the lock of the interpreter: only a kill ends it
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "raise":
        raise ValueError("it is me")
    if solution_str == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    return {"score": float(len(solution_str)), "process": os.getpid()}

def by_group(responses, group):
    """One call for all responses to a prompt."""
    if "slow" in responses:
        time.sleep(600)
    assert len(set(group)) == 1
    return [float(len(responses))] * len(responses)

async def waits(responses, seconds):
    await asyncio.sleep(seconds[0])
    return [1.0]

def leaves(solution_str):
    raise KeyboardInterrupt if solution_str == "interrupt" else SystemExit(7)
'''

NAMES = ("by_text", "by_group", "waits", "leaves")
BY_TEXT, BY_GROUP, WAITS, LEAVES = range(len(NAMES))
DEADLINE_S = 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards")
    (path / "pooled_rewards.py").write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def functions(folder: Path) -> Iterator[ScoringFunctions]:
    specs = [FunctionSpec(name=name, function=f"pooled_rewards:{name}", deadline_s=DEADLINE_S) for name in NAMES]
    scoring = ScoringFunctions(specs, search_path=[str(folder)], num_processes=2)
    yield scoring
    scoring.close()


def samples(*responses: str, **more: Any) -> Samples:
    return Samples(prompts=["p"] * len(responses), responses=responses, answers=["a"] * len(responses), **more)


def test_scores_come_in_the_order_of_the_responses(functions: ScoringFunctions) -> None:
    texts = ["x" * (number % 7) for number in range(500)]
    (scored,) = functions.score(samples(*texts), [BY_TEXT])
    assert scored.scores == [float(len(text)) for text in texts]
    assert scored.failed == [False] * len(texts) and all(scored.valid)
    assert os.getpid() not in scored.metrics["process"]


def test_only_the_call_that_hangs_or_crashes_has_no_score(functions: ScoringFunctions) -> None:
    texts = ["a"] * 20 + ["hang"] + ["a"] * 20 + ["exit"] + ["a"] * 20
    (scored,) = functions.score(samples(*texts), [BY_TEXT])
    assert [row for row, failed in enumerate(scored.failed) if failed] == [20, 41]
    assert [row for row, valid in enumerate(scored.valid) if not valid] == [20, 41]
    (again,) = functions.score(samples("a", "aa"), [BY_TEXT])
    assert again.scores == [1.0, 2.0]


def test_processes_that_all_end_are_noticed_at_once(folder: Path) -> None:
    spec = FunctionSpec(name="by_text", function="pooled_rewards:by_text", deadline_s=3600.0)
    scoring = ScoringFunctions([spec], search_path=[str(folder)], num_processes=2)
    (scored,) = scoring.score(samples(*["exit"] * 30), [0])  # one that was missed would wait for an hour
    scoring.close()
    assert scored.failed == [True] * 30


def test_a_group_is_one_call_wherever_its_rows_stand(functions: ScoringFunctions) -> None:
    groups = [3, 1, 3, 2, 1, 3]
    batch = samples("a", "b", "slow", "c", "d", "e", groups=groups, columns=[{"group": group} for group in groups])
    start_s = time.monotonic()
    (scored,) = functions.score(batch, [BY_GROUP])
    assert time.monotonic() - start_s >= 3 * DEADLINE_S  # that of a response, times the responses of the call
    assert scored.failed == [True, False, True, False, False, True]
    assert [score for score, failed in zip(scored.scores, scored.failed, strict=True) if not failed] == [2.0, 1.0, 2.0]


def test_several_functions_are_called_together(functions: ScoringFunctions) -> None:
    batch = samples("a", "bb", groups=[0, 0], columns=[{"group": 0}] * 2)
    text, group = functions.score(batch, [BY_TEXT, BY_GROUP])
    assert text.scores == [1.0, 2.0]
    assert group.scores == [2.0, 2.0]


def test_async_calls_wait_together_and_end_alone(functions: ScoringFunctions) -> None:
    columns = [{"seconds": 60.0 if number == 4 else 0.05} for number in range(40)]
    (scored,) = functions.score(samples(*"a" * 40, columns=columns), [WAITS])
    assert [row for row, failed in enumerate(scored.failed) if failed] == [4]


def test_an_exception_ends_the_run_with_its_place(functions: ScoringFunctions, folder: Path) -> None:
    with pytest.raises(RewardError) as caught:
        functions.score(samples("a", "raise", "hang"), [BY_TEXT])
    message = str(caught.value)
    assert "the reward function pooled_rewards:by_text raised ValueError: it is me" in message
    assert f"{folder}/pooled_rewards.py:11, in by_text" in message
    assert "while it scored sample 1: prompt " in message and "response 'raise'" in message
    with pytest.raises(RewardError, match="leaves raised SystemExit: 7"):
        functions.score(samples("a"), [LEAVES])
    with pytest.raises(RewardError, match="leaves raised KeyboardInterrupt"):
        functions.score(samples("interrupt"), [LEAVES])
    assert functions.score(samples("a"), [BY_TEXT])[0].scores == [1.0]


def test_a_column_that_the_data_lacks_is_named(functions: ScoringFunctions) -> None:
    with pytest.raises(RewardError, match=r"has the parameter 'group', which is neither offered nor a column"):
        functions.score(samples("a"), [BY_GROUP])
    absent = samples("a", columns=[{"size": 1}])  # from this batch alone
    assert functions.score(absent, [BY_GROUP])[0].scores == [1.0]


def test_a_callable_travels_to_the_processes() -> None:
    weight = 3.0

    def heavy(responses: list[str]) -> list[Any]:
        return [{"score": weight, "process": os.getpid()} for _ in responses]

    scoring = ScoringFunctions([FunctionSpec(name="heavy", function=heavy)], num_processes=1)
    (scored,) = scoring.score(samples("a", "b"))
    scoring.close()
    assert scored.scores == [3.0, 3.0]
    assert scored.metrics["process"][0] != os.getpid()


def test_a_callable_that_stays_here_ends_the_run_at_its_deadline() -> None:
    lock = threading.Lock()  # cannot be pickled

    def held(responses: list[str]) -> list[float]:
        with lock:
            return [1.0] * len(responses)

    with pytest.warns(UserWarning, match="'held' runs in this process, because it cannot be pickled"):
        scoring = ScoringFunctions([FunctionSpec(name="held", function=held, deadline_s=0.1)])
    assert scoring.score(samples("a"))[0].scores == [1.0]
    with lock, pytest.raises(RewardError, match=r"held has not returned after 0.1 s. .* Raise deadline_s"):
        scoring.score(samples("a"))


def processes_of(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def test_close_leaves_no_process(folder: Path) -> None:
    threads = set(threading.enumerate())
    before = {each.pid for each in processes_of(os.getpid())}
    spec = FunctionSpec(name="by_text", function="pooled_rewards:by_text")
    scoring = ScoringFunctions([spec], search_path=[str(folder)], num_processes=2)
    scoring.score(samples("a", "child"))
    started = [each for each in processes_of(os.getpid()) if each.pid not in before]
    assert len(started) >= 4  # the host, two processes, and what a function started
    (watch,) = (each for each in set(threading.enumerate()) - threads if each.name == "reward-host")
    scoring.score(samples("a"))
    assert watch.is_alive()
    scoring.close()
    assert wait_for_end(started)
    watch.join(10)
    assert not watch.is_alive()


@pytest.mark.parametrize("text", ["a", "a" * 1_000_000])  # a message that fits the pipe, and one that does not
def test_a_host_that_is_stopped_is_ended(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_algorithms.rewards._pool.client._LOOK_S", 0.05)
    before = {each.pid for each in processes_of(os.getpid())}
    spec = FunctionSpec(name="by_text", function="pooled_rewards:by_text")
    scoring = ScoringFunctions([spec], search_path=[str(folder)], num_processes=2)
    scoring.score(samples("a"))
    started = [each for each in processes_of(os.getpid()) if each.pid not in before]
    (host,) = (each for each in started if each.ppid() == os.getpid())
    host.suspend()
    with pytest.raises(RewardError, match=rf"SIGSTOP held their host, process {host.pid}, for 0.5 s. It was ended"):
        scoring.score(samples(text))
    assert wait_for_end(started)
    scoring.close()


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_that_is_killed_leaves_no_process(folder: Path, kind: signal.Signals) -> None:
    """While a function holds the lock of its interpreter, and the host waits for it."""
    program = (
        "from hf_algorithms.rewards import *\n"
        "spec = FunctionSpec(name='f', function='pooled_rewards:by_text', deadline_s=600)\n"
        f"scoring = ScoringFunctions([spec], search_path=[{str(folder)!r}], num_processes=2)\n"
        "def batch(*texts): return Samples(prompts=texts, responses=texts, answers=texts)\n"
        "scoring.score(batch('a', 'child'))\n"
        "print('ready', flush=True)\n"
        "scoring.score(batch('hang'))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None and running.stdout.readline() == "ready\n"
        started = processes_of(running.pid)
        busy = [each for each in started if each.pid != running.pid]
        assert wait_until(lambda: any(each.cpu_percent(0.1) > 1 for each in busy))
        running.send_signal(kind)
    assert len(started) >= 4
    assert wait_for_end(started)


def test_what_a_reward_prints_is_whole_and_off_the_results(tmp_path: Path) -> None:
    """Stdout of a program, such as `evaluate --json`, is its results alone; what is killed flushes nothing."""
    (tmp_path / "prints.py").write_text(
        "print('imported')\ndef score(solution_str):\n    print('scored', solution_str)\n    return 1.0\n"
    )
    program = (
        "from hf_algorithms.rewards import *\n"
        "spec = FunctionSpec(name='f', function='prints:score')\n"
        f"scoring = ScoringFunctions([spec], search_path=[{str(tmp_path)!r}], num_processes=1)\n"
        "scoring.score(Samples(prompts=['p'] * 2, responses=['a', 'b'], answers=['a'] * 2))\n"
        "scoring.close()\n"
        "print('results')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "results\n"
    assert ended.stderr.splitlines() == ["imported", "imported", "scored a", "scored b"]


def wait_for_end(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=20)[1]


def wait_until(condition: Callable[[], bool], most_s: float = 20.0) -> bool:
    end_s = time.monotonic() + most_s
    while time.monotonic() < end_s:
        if condition():
            return True
    return False


@pytest.mark.parametrize("num_processes", [0, 1])
def test_a_call_imports_neighbours_of_a_file_in_any_folder(tmp_path: Path, num_processes: int) -> None:
    """`file.py:function` names a file outside of the folders of the configuration."""
    (tmp_path / "lazy_rewards.py").write_text(
        "def score(responses):\n    import lazy_neighbour\n    return [lazy_neighbour.PAID] * len(responses)\n"
    )
    (tmp_path / "lazy_neighbour.py").write_text("PAID = 2.5\n")
    (tmp_path / "other").mkdir()
    spec = FunctionSpec(name="lazy", function=f"{tmp_path}/lazy_rewards.py:score")
    with closing(ScoringFunctions([spec], search_path=[str(tmp_path / "other")], num_processes=num_processes)) as pool:
        (scored,) = pool.score(samples("a", "b"), [0])
    assert scored.scores == [2.5, 2.5]
