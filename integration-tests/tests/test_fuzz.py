"""Damaged files of every kind: 2,000 in the slow tests, and as many as one likes by `make fuzz`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fuzz import check_inputs
from fuzzed_readers import Fuzzed
from hf_protocols import ConfigError
from mutated_inputs import mutate


@pytest.mark.timeout(600)
@pytest.mark.parametrize("numbers", [range(200), pytest.param(range(200, 2_000), marks=pytest.mark.slow)], ids=len)
def test_damaged_files_are_refused_or_shown(numbers: range) -> None:
    assert "\n".join(check_inputs(numbers)) == ""


@pytest.mark.parametrize("kind", ["json", "jsonl", "toml", "csv", "bytes"])
@pytest.mark.parametrize("data", [b"", b"\n", b"\na,b\n", b"[]", b"\xff"])
def test_what_has_lost_its_structure_is_damaged_by_its_bytes(kind: str, data: bytes) -> None:
    assert {type(mutate(data, kind, random.Random(number))) for number in range(200)} == {bytes}


def test_readers_that_fail_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A foreign error, and one of ours that does not name the file; each comes with what repeats it."""
    monkeypatch.setattr("fuzz.KEPT", tmp_path)
    errors = {
        "foreign": IndexError("9"),
        "nameless": ConfigError("a value is wrong"),
        "named": ConfigError("plan.json"),
    }
    found = {}
    for name, error in errors.items():
        calls = 0

        def read(folder: Path, error: Exception = error) -> None:
            nonlocal calls
            calls += 1
            if calls > 1:  # the first one reads the healthy file
                raise error

        found[name] = check_inputs([7], [Fuzzed(name, "plan.json", read)])
    assert found["named"] == []
    assert "--reader 'foreign' --number 7" in found["foreign"][0] and "IndexError: 9" in found["foreign"][0]
    assert "does not name plan.json" in found["nameless"][0]
    assert (tmp_path / "7-plan.json").exists()
