"""Subjects of commits have the form that CONTRIBUTING.md states."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "commit_subject.py"))


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("engine: stream shards into vLLM by bucket", None),
        ("protocols, mapper: name samples in the dataflow", None),
        ("bench_reshard: compare both sides in turns", None),
        (f"docs: {'x' * 67}", "has 73 characters, at most 72 are allowed"),
        ("Stream shards into vLLM by bucket", "is not of the form `area: verb object` without a full stop"),
        ("engine: stream shards.", "is not of the form `area: verb object` without a full stop"),
        ("engine:stream shards", "is not of the form `area: verb object` without a full stop"),
    ],
)
def test_subject_faults_are_named(script: dict[str, Any], subject: str, fault: str | None) -> None:
    assert script["find_fault"](subject) == fault


def test_subject_of_a_message_is_its_first_line(
    script: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = tmp_path / "COMMIT_EDITMSG"
    message.write_text("Move things\n\nengine: a body\n")
    assert script["main"]([str(message)]) == 1
    assert capsys.readouterr().out.startswith("'Move things' is not of the form")


def test_subjects_since_the_recorded_commit_have_the_form(
    script: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    if script["list_subjects"]() is None:
        pytest.skip("not a git checkout, or one without the recorded commit")
    status = script["main"]([])
    assert (status, capsys.readouterr().out) == (0, "")


def test_hooks_before_a_commit_run_programs_that_exist() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    scripts = [word for hook in hooks for word in hook["entry"].split() if word.startswith("scripts/")]
    assert scripts and [name for name in scripts if not (ROOT / name).is_file()] == []
