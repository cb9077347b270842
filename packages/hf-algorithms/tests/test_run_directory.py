from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_algorithms.run_directory import RunDirectory
from hf_protocols import ConfigError


def test_metrics_are_one_object_a_line(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "deep" / "run")
    directory.append_metrics({"iteration": 1, "reward/mean": 0.5})
    directory.append_metrics({"iteration": 2, "reward/mean": 0.75})
    lines = (directory.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2]


def test_an_earlier_run_is_replaced_only_when_asked(tmp_path: Path) -> None:
    first = RunDirectory(tmp_path / "run")
    first.write_json("summary.json", {"iterations": 1})
    with pytest.raises(ConfigError, match="is not empty: choose another directory, or --overwrite"):
        RunDirectory(tmp_path / "run")
    assert (first.path / "summary.json").is_file()
    RunDirectory(tmp_path / "run", overwrite=True)
    assert not (first.path / "summary.json").exists()


def test_a_folder_that_no_run_made_is_never_emptied(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="is not empty"):
        RunDirectory(tmp_path, overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.output_dir=.* cannot be written: Not a directory"):
        RunDirectory(tmp_path / "file" / "run")
