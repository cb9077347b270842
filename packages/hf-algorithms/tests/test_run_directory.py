from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_algorithms.checkpoints import find_commits
from hf_algorithms.run_directory import ORIGIN, RunDirectory, RunDirectoryError
from hf_protocols import ConfigError


def begun(path: Path, **options: bool) -> RunDirectory:
    directory = RunDirectory(path, **options)
    directory.begin()
    return directory


def test_metrics_are_one_object_a_line(tmp_path: Path) -> None:
    directory = begun(tmp_path / "deep" / "run")
    directory.append_metrics({"iteration": 1, "reward/mean": 0.5})
    directory.append_metrics({"iteration": 2, "reward/mean": 0.75})
    lines = (directory.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2]


def test_begin_replaces_an_earlier_run_only_with_overwrite(tmp_path: Path) -> None:
    first = begun(tmp_path / "run")
    first.write_json("summary.json", {"iterations": 1})
    first.close()
    with pytest.raises(ConfigError, match=r"is not empty. Choose another directory, or --overwrite"):
        RunDirectory(tmp_path / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"is not empty and not the directory of a run. Choose"):
            RunDirectory(tmp_path / "mine", overwrite=overwrite)
    second = RunDirectory(tmp_path / "run", overwrite=True)
    assert (first.path / "summary.json").is_file()
    (first.path / "notes.txt").write_text("mine")
    second.begin()
    assert not (first.path / "summary.json").exists()
    assert (first.path / "notes.txt").read_text() == "mine"


def test_a_replaced_run_is_not_what_the_next_one_goes_on_with(tmp_path: Path) -> None:
    """It says how it was started until another one begins; what a run goes on with stays while it begins again."""
    first = begun(tmp_path / "run")
    for name in (ORIGIN, "plan.json", "summary.json"):
        first.write_text(name, "{}")
    first.close()
    again = begun(tmp_path / "run", resume=True)
    again.clear(keeps=["plan.json"])
    assert [(first.path / name).exists() for name in (ORIGIN, "plan.json", "summary.json")] == [True, True, False]
    assert (first.path / ORIGIN).read_text() == "{}"
    again.close()
    begun(tmp_path / "run", overwrite=True)
    assert (first.path / ORIGIN).read_text() == ""
    assert not (first.path / "plan.json").exists()


@pytest.mark.parametrize("name", ["run", "deep/er/run"])
def test_nothing_is_made_before_the_beginning(tmp_path: Path, name: str) -> None:
    directory = RunDirectory(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    assert not directory.has_begun
    directory.begin()
    assert directory.has_begun
    assert (tmp_path / name / "metrics.jsonl").is_file()


@pytest.mark.parametrize("name", [f"deep/er/{'x' * 300}", "zero\0byte", "deep/" + "x/" * 3000])
def test_a_directory_that_cannot_be_made_is_refused_at_once(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.output_dir=.* cannot be written"):
        RunDirectory(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no /proc here")
def test_a_file_system_without_new_files_is_refused_at_once() -> None:
    """Also for root, to whom the permissions of /proc allow it."""
    message = r"^run\.output_dir='/proc/runs/one' cannot be written: .*. Choose another directory$"
    with pytest.raises(ConfigError, match=message):
        RunDirectory(Path("/proc/runs/one"))


def test_an_empty_folder_is_used_and_stays_empty(tmp_path: Path) -> None:
    RunDirectory(tmp_path)
    RunDirectory(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_no_run_made_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("another program's")
    with pytest.raises(ConfigError, match="is not empty"):
        RunDirectory(tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_inputs_of_the_run_that_would_be_replaced_are_refused(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    (tmp_path / "model").mkdir()
    directory.check_inputs({"data.train": str(tmp_path / "data" / "rows.jsonl"), "data.test": None})
    with pytest.raises(ConfigError, match=r"model\.path=.* belongs to the run that would be replaced"):
        directory.check_inputs({"model.path": str(tmp_path / "model")})


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    with directory.replacing("model") as folder:
        folder.mkdir()
        (folder / "weights").write_text("old")
    with pytest.raises(RunDirectoryError, match="No such file"), directory.replacing("model") as folder:
        (folder / "weights").write_text("into a folder that nobody made")
    assert (tmp_path / "model" / "weights").read_text() == "old"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl in run\.output_dir=.* cannot be written"):
        directory.append_metrics({"iteration": 1})


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.output_dir=.* cannot be written: Not a directory"):
        RunDirectory(tmp_path / "file" / "run")


def replace_model(directory: RunDirectory) -> None:
    with directory.replacing("model") as folder:
        folder.mkdir(parents=True)


WRITERS: dict[str, Callable[[RunDirectory], object]] = {
    "summary.json": lambda directory: directory.write_json("summary.json", {}),
    "metrics.jsonl": lambda directory: directory.append_metrics({"iteration": 1}),
    "samples": lambda directory: directory.append_samples(1, [{"prompt": "1+1="}]),
    "model": replace_model,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_directory_that_was_removed_is_not_made_again(tmp_path: Path, name: str) -> None:
    directory = begun(tmp_path / "run")
    shutil.rmtree(directory.path)
    with pytest.raises(RunDirectoryError, match=rf"{name} cannot be written: .*run' was removed while the run went on"):
        WRITERS[name](directory)
    assert not directory.path.exists()


def test_a_summary_has_no_words_beyond_json(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    run.write_json("summary.json", {"score_before": math.nan, "interval": (0.5, math.inf), "phases": {"a": -math.inf}})
    run.close()
    found = json.loads((tmp_path / "run/summary.json").read_text(), parse_constant=pytest.fail)
    assert found == {"score_before": None, "interval": [0.5, None], "phases": {"a": None}}


def test_commits_on_another_disk_go_with_their_run(tmp_path: Path) -> None:
    disk, path = tmp_path / "disk", tmp_path / "run"
    begun(path).close()
    (disk / "100").mkdir(parents=True)
    (disk / "100" / "COMMIT").write_text("{}")
    (path / "steps").symlink_to(disk)
    assert find_commits(path) == [100]
    begun(path, overwrite=True).close()
    assert find_commits(path) == []
    assert (path / "steps").resolve() == disk, "later commits go there"


def test_samples_with_an_unpaired_surrogate_are_written(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    run.append_samples(1, [{"note": "\ud83d", "text": "\u00e9"}, {"text": "\u00e9"}])
    run.close()
    lines = (tmp_path / "run/samples/1.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line).get("note") for line in lines] == ["\ud83d", None]
    assert "\u00e9" in lines[1], "what a person reads stays as it is"


def test_a_folder_that_does_not_fit_names_the_run(tmp_path: Path) -> None:
    """As a model that moves to a full disk: the error of its files lists each of them."""

    run = begun(tmp_path / "run")
    says = r"^initial_model in run.output_dir='.*/run' cannot be written: No space left on device. Free some space"
    with pytest.raises(RunDirectoryError, match=says), run.replacing("initial_model"):
        raise shutil.Error([("a", "b", "[Errno 28] No space left on device: 'a' -> 'b'")])


def test_removing_takes_files_and_folders(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    (run.path / "samples" / "4.jsonl").mkdir(parents=True)
    (run.path / "samples" / "5.jsonl").touch()
    for name in ("4.jsonl", "5.jsonl"):
        run.remove(f"samples/{name}")
    assert list((run.path / "samples").iterdir()) == []
