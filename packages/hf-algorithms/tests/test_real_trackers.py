"""The four trackers with their real libraries and without a network; what they wrote is read back."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hf_algorithms.config import build_sections, parse_config
from hf_algorithms.run_directory import RunDirectory
from hf_algorithms.trackers import TRACKERS, _follow, prepare_tracking

pytestmark = [pytest.mark.trackers, pytest.mark.timeout(600)]

NAME = "eval/validation/pass@4"
ALONE = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_real_trackers
from hf_algorithms.trackers import _wandb
_wandb._CONNECT_S = 3.0
print(json.dumps(test_real_trackers.run(Path(sys.argv[2]), ["wandb"])))
"""


@pytest.fixture(scope="module")
def trackio_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Trackio reads its folder from the environment when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        yield


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trackio_folder: None) -> None:
    """Places by the libraries' own variables, and no account."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_follow, "_CLOSE_S", 200.0)  # MLflow makes its tables within it, on a busy machine
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("TRACKIO_PROJECT", tmp_path.name)
    monkeypatch.setenv("NETRC", str(tmp_path / "absent"))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)


def run(path: Path, names: list[str], error: BaseException | None = None) -> list[str]:
    notes: list[str] = []
    config = parse_config(
        {"data": {"train": "rows.jsonl"}, "run": {"output_dir": str(path), "trackers": names, "seed": 7}}
    )
    directory = RunDirectory(path)
    tracking = prepare_tracking(config.run.trackers)
    directory.begin()
    with suppress(KeyboardInterrupt), tracking.follow(directory, notes.append, sections=build_sections(config)):
        for iteration in (1, 2):
            directory.append_metrics({"iteration": iteration, "reward/mean": iteration / 2, NAME: 0.25})
        directory.write_json("summary.json", {"score_after": 0.75, "metric": "exact", "iterations": 2})
        if error is not None:
            raise error
    return notes


def read_tensorboard(folder: Path) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "my-run" / "tensorboard")).Reload()
    config, summary = (
        json.loads(events.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0].decode()[len("```json") : -3])
        for name in ("config", "summary")
    )
    rows = {name: [(each.step, each.value) for each in events.Scalars(name)] for name in ("reward/mean", NAME)}
    score = events.Scalars("summary/score_after")[0].value
    return {"name": Path(config["run"]["output_dir"]).name, "seed": str(config["run"]["seed"]), "summary": score} | {
        "status": summary["status"],
        **rows,
    }


def read_wandb(folder: Path) -> dict[str, Any]:
    """Waits for what the library's own process still writes after the end of a run, and reads it."""
    (path,) = (folder / "my-run").glob("wandb/offline-run-*/run-*.wandb")
    end_s = time.monotonic() + 60
    while "status" not in (found := read_wandb_log(path.read_bytes())) and time.monotonic() < end_s:
        time.sleep(0.1)
    return found


def read_wandb_log(data: bytes) -> dict[str, Any]:
    """Reads the records of the library, which lie in a log of LevelDB's format after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    place, body = 7, b""
    found: dict[str, Any] = {"reward/mean": [], NAME: []}
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        size, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        body += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # the last part of a record
            _read_record(Record.FromString(body), found)
            body = b""
    return found


def _read_record(record: Any, found: dict[str, Any]) -> None:
    if record.WhichOneof("record_type") == "run":
        config = {each.key: json.loads(each.value_json) for each in record.run.config.update}
        found |= {"name": record.run.display_name, "seed": str(config["run"]["seed"])}
    for each in record.summary.update:
        if each.key in ("status", "score_after"):
            found["status" if each.key == "status" else "summary"] = json.loads(each.value_json)
    row = {"/".join(each.nested_key) or each.key: json.loads(each.value_json) for each in record.history.item}
    for name in ("reward/mean", NAME):
        if name in row:
            found[name].append((row["_step"], row[name]))


def read_mlflow(folder: Path) -> dict[str, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("hybridflow")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == {"finished": "FINISHED", "interrupted": "KILLED"}[run.data.tags["summary.status"]]
    rows = {
        name: [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name.replace("@", "_"))]
        for name in ("reward/mean", NAME)
    }
    return {
        "name": run.info.run_name,
        "seed": run.data.params["run.seed"],
        "status": run.data.tags["summary.status"],
        "summary": run.data.metrics["summary/score_after"],
        **rows,
    }


def read_trackio(folder: Path) -> dict[str, Any]:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs(folder.name)
    *rows, summary = SQLiteStorage.get_logs(folder.name, run.name)
    assert run.config is not None
    return {
        "name": run.name,
        "seed": str(run.config["run"]["seed"]),
        "status": summary["summary/status"],
        "summary": summary["summary/score_after"],
        **{name: [(row["step"], row[name]) for row in rows] for name in ("reward/mean", NAME)},
    }


READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
}


@pytest.mark.parametrize("name", TRACKERS)
@pytest.mark.parametrize("error", [None, KeyboardInterrupt()], ids=["finished", "interrupted"])
def test_a_library_reads_what_was_written(tmp_path: Path, name: str, error: BaseException | None) -> None:
    notes = run(tmp_path / "my-run", [name], error)
    status = "finished" if error is None else "interrupted"
    assert [note for note in notes if "offline" not in note] == []
    assert READERS[name](tmp_path) == {
        "name": "my-run",
        "seed": "7",
        "status": status,
        "reward/mean": [(1, 0.5), (2, 1.0)],
        NAME: [(1, 0.25), (2, 0.25)],
        "summary": 0.75,
    }


def test_wandb_without_a_server_is_kept_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    # in a program of its own: the library keeps key and server until a program ends
    command = [sys.executable, "-c", ALONE, str(Path(__file__).parent), str(tmp_path / "my-run")]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200).stdout
    notes = json.loads(output.splitlines()[-1])
    assert len(notes) == 1 and notes[0].startswith("wandb: the run is kept offline, because ")
    assert "127.0.0.1:9" in notes[0] and "no API key" not in notes[0]
    assert read_wandb(tmp_path)["reward/mean"] == [(1, 0.5), (2, 1.0)]
    assert "trackers" not in json.loads((tmp_path / "my-run" / "summary.json").read_text())
