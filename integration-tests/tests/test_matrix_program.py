"""`benchmarks/matrix.py` counts pairs and nothing else, and is not content with none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matrix
import measurement
import pytest

TESTS = """
import pytest

def test_the_cover():
    pass

@pytest.mark.parametrize("pair", ["one", "two", "three"])
def test_generation_is_that_of_the_exported_model(pair):
    assert pair != "two"
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with an environment and three pairs, of which one fails."""
    tests = tmp_path / matrix.TESTS.partition("::")[0]
    tests.parent.mkdir(parents=True)
    tests.write_text(TESTS)
    program = tmp_path / ".venv" / "bin" / "pytest"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m pytest -p no:cacheprovider --rootdir {tmp_path} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    monkeypatch.setattr(measurement, "RESULTS", tmp_path / "results")
    return tmp_path


def test_pairs_alone_are_kept_with_the_engines_versions(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "ENVIRONMENTS", {"": "not vllm"})
    monkeypatch.setattr(matrix, "read_engine_versions", lambda: {"vllm": "0.32.0"})
    assert matrix.main() == 1
    result = json.loads((project / "results" / "matrix.json").read_text())
    assert {name: metric["value"] for name, metric in result["metrics"].items()} == {"one": 1, "two": 0, "three": 1}
    assert result["versions"]["vllm"] == "0.32.0"


def test_an_environment_that_runs_no_pair_is_an_error(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "ENVIRONMENTS", {"": "vllm"})
    with pytest.raises(SystemExit, match=r"pytest .* -m vllm .* ended with 5: it did not run the pairs"):
        matrix.main()
    assert not (project / "results").exists()
