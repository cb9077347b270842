"""Following a run with trackers: names, failures, secrets and the hook. test_real_trackers.py has the libraries."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hf_algorithms.config import Config, build_sections, parse_config
from hf_algorithms.run_directory import RunDirectory
from hf_algorithms.trackers import TRACKERS, RunFacts, Status, _follow, prepare_tracking
from hf_algorithms.trackers._tracker import hide_config_secrets, select_summary
from hf_protocols import ConfigError

HOOKS = """
def good(iteration, metrics):
    print("hook", iteration, metrics)

def failing(iteration, metrics):
    if iteration == 2:
        raise KeyError("no such metric")

def of_one(iteration):
    pass


async def later(iteration, metrics):
    raise AssertionError("nobody awaits it")


def one_by_one(iteration, metrics):
    yield iteration


class Later:
    async def __call__(self, iteration, metrics):
        raise AssertionError("nobody awaits it")


object_later = Later()
"""


class RecordingTracker:
    """A tracker that keeps its arguments, and fails in the iteration `fails_at`."""

    made: ClassVar[list[RecordingTracker]] = []
    fails_at: int | None = None

    def __init__(self) -> None:
        self.rows: list[tuple[int, Mapping[str, float]]] = []
        self.ends: list[tuple[Status, Mapping[str, Any], int]] = []
        RecordingTracker.made.append(self)

    def start(self, run: RunFacts) -> str | None:
        self.facts = run
        return "a note"

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        if iteration == self.fails_at:
            raise OSError("http://user:password@server/ does not answer\nsecond line")
        self.rows.append((iteration, metrics))

    def finish(self, status: Status, summary: Mapping[str, Any], iteration: int) -> None:
        self.ends.append((status, summary, iteration))


class Stuck(RecordingTracker):
    """A tracker whose server never answers."""

    never = threading.Event()

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self.never.wait()


def build_config(**run: Any) -> Config:
    return parse_config({"data": {"train": "rows.jsonl"}, "run": run})


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[RecordingTracker]:
    monkeypatch.setattr(RecordingTracker, "made", [])
    monkeypatch.setattr(RecordingTracker, "fails_at", None)
    monkeypatch.setattr(_follow, "load_tracker", lambda name: Stuck() if name == "trackio" else RecordingTracker())
    return RecordingTracker


def follow(config: Config, path: Path, act: Callable[[RunDirectory], None]) -> list[str]:
    """Begins a run there, lets it act while it is followed, and returns the notes."""
    notes: list[str] = []
    directory = RunDirectory(path, overwrite=True)
    directory.begin()
    tracking = prepare_tracking(config.run.trackers, config.run.on_metrics, search_path=[str(path.parent)])
    with tracking.follow(directory, notes.append, sections=build_sections(config)):
        act(directory)
    return notes


def write_three(directory: RunDirectory) -> None:
    for iteration in (1, 2, 3):
        directory.append_metrics({"iteration": iteration, "reward/mean": iteration / 2, "kl/k1": float("nan")})
    directory.write_json("summary.json", {"iterations": 3, "error": {"type": "DataError", "message": "row 'text'"}})


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["tensorbord"], "run.trackers: 'tensorbord' is not a tracker. Did you mean 'tensorboard'?"),
        (["comet"], "run.trackers: 'comet' is not a tracker. Use tensorboard, wandb, mlflow, trackio"),
        (["mlflow", "wandb", "mlflow"], "run.trackers: 'mlflow' is named twice. Remove one"),
    ],
)
def test_wrong_names_are_one_line(names: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_config(trackers=names)
    assert str(error.value) == problem


def test_a_missing_library_names_its_extra() -> None:
    for name in TRACKERS:
        try:
            version(name)
        except PackageNotFoundError:
            expected = f"run.trackers: {name} is not installed. Install it: pip install 'hf-algorithms[{name}]'"
            with pytest.raises(ConfigError) as error:
                prepare_tracking([name])
            assert str(error.value) == expected


def test_a_tracker_gets_all_that_is_written(recorder: type[RecordingTracker], tmp_path: Path) -> None:
    notes = follow(build_config(trackers=["mlflow"], seed=3), tmp_path / "my-run", write_three)
    (made,) = recorder.made
    assert (made.facts.name, made.facts.algorithm, made.facts.config["run"]["seed"]) == ("my-run", "ppo", 3)
    assert made.rows == [(number, {"reward/mean": number / 2}) for number in (1, 2, 3)]
    assert made.ends == [("finished", {"iterations": 3.0, "error.type": "DataError"}, 3)]
    assert notes == ["a note"]
    assert "trackers" not in json.loads((tmp_path / "my-run" / "summary.json").read_text())


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt, "interrupted"), (SystemExit, "interrupted"), (ConfigError, "failed")],
)
def test_trackers_end_with_every_run(
    recorder: type[RecordingTracker], tmp_path: Path, error: type[BaseException], status: Status
) -> None:
    def stop(directory: RunDirectory) -> None:
        raise error

    with pytest.raises(error):
        follow(build_config(trackers=["mlflow"]), tmp_path / "run", stop)
    assert recorder.made[0].ends == [(status, {}, 0)]


def test_a_failing_tracker_is_said_once_and_counted(recorder: type[RecordingTracker], tmp_path: Path) -> None:
    recorder.fails_at = 2
    notes = follow(build_config(trackers=["mlflow"]), tmp_path / "run", write_three)
    problem = "OSError: http://***@server/ does not answer"
    assert notes[1:] == [
        f"warning: the tracker mlflow failed: {problem}. The run goes on without it",
        "mlflow: 2 of 3 iterations are missing there",
    ]
    assert [number for number, _ in recorder.made[0].rows] == [1]
    assert [status for status, *_ in recorder.made[0].ends] == ["finished"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["trackers"] == {"mlflow": {"error": problem, "iterations_lost": 2}}


def test_a_stuck_tracker_ends_with_the_deadline(
    recorder: type[RecordingTracker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_follow, "_CLOSE_S", 0.1)
    monkeypatch.setattr(Stuck, "never", threading.Event())
    notes = follow(build_config(trackers=["trackio"]), tmp_path / "run", write_three)
    assert notes[-1] == "trackio: 3 of 3 iterations are missing there"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["trackers"]["trackio"]["error"] == "it did not end within 0.1 s"
    Stuck.never.set()


def test_a_hook_is_called_with_each_iteration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hooks.py").write_text(HOOKS)
    assert follow(build_config(on_metrics="hooks.py:good"), tmp_path / "run", write_three) == []
    assert capsys.readouterr().out.splitlines() == [f"hook {n} {{'reward/mean': {n / 2}}}" for n in (1, 2, 3)]


def test_a_hook_may_be_a_callable(tmp_path: Path) -> None:
    seen: list[int] = []
    directory = RunDirectory(tmp_path / "run")
    directory.begin()
    tracking = prepare_tracking([], lambda iteration, metrics: seen.append(iteration))
    with tracking.follow(directory, print, sections=build_sections(build_config())):
        write_three(directory)
    assert seen == [1, 2, 3]


def test_a_failing_hook_leaves_the_run_alone(tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text(HOOKS)
    notes = follow(build_config(on_metrics="hooks.py:failing"), tmp_path / "run", write_three)
    assert notes[0].startswith("warning: run.on_metrics raised KeyError: 'no such metric'\n  at ")
    assert notes[1] == "on_metrics: 2 of 3 iterations are missing there"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("hooks.py:absent", "run.on_metrics: 'hooks.py:absent': absent does not exist in "),
        (
            "hooks.py:of_one",
            "run.on_metrics = 'hooks.py:of_one': it cannot be called with an iteration and its metrics",
        ),
        *(
            (f"hooks.py:{name}", f"run.on_metrics = 'hooks.py:{name}': an async function or a generator does nothing")
            for name in ("later", "one_by_one", "object_later")
        ),
    ],
)
def test_a_wrong_hook_is_refused(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "hooks.py").write_text(HOOKS)
    with pytest.raises(ConfigError) as error:
        prepare_tracking([], name, search_path=[str(tmp_path)])
    assert str(error.value).startswith(problem)


def test_no_secret_is_sent() -> None:
    body = {
        "reward": {"function": "https://user:abc@host/score?token=abc", "functions": [{"function": "http://abc@h"}]},
        "rollout": {"options": {"api_key": "abc", "max_new_tokens": 4}, "max_new_tokens": 8},
        "data": {"system_prompt": "see http://u:abc@host"},
    }
    hidden = hide_config_secrets(body)
    assert "abc" not in json.dumps(hidden)
    assert hidden["rollout"] == {"options": {"api_key": "***", "max_new_tokens": 4}, "max_new_tokens": 8}


def test_a_summary_is_sent_without_rows() -> None:
    body = {
        "score_after": 0.5, "infeasible": True, "metric": "m", "samples": [{"prompt": "p"}], "loss": float("inf"),
        "error": {"type": "DataError", "message": "row 'p'"},
    }  # fmt: skip
    expected = {
        "score_after": 0.5,
        "infeasible": "True",
        "metric": "m",
        "error.type": "DataError",
    }
    assert select_summary(body) == expected
