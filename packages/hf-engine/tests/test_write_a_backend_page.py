"""The page on rollout backends: its package is found by its entry point, and its proof passes, as written."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from engine_testing.forked_programs import run_forked

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "write-a-rollout-backend.md"


def test_the_package_of_the_page_conforms(tmp_path: Path) -> None:
    files = dict(re.findall(r"`([\w.]+)`:\n\n```\w+\n(.*?)```", PAGE.read_text(), re.DOTALL))
    assert files.keys() == {"pyproject.toml", "plain_rollout.py", "check.py"}
    assert len(files["plain_rollout.py"].splitlines()) < 100
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    project = tomllib.loads(files["pyproject.toml"])["project"]
    # what an installation leaves, without an index to install from
    info = tmp_path / f"plain_rollout-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    ((group, entries),) = project["entry-points"].items()
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    environment = {"PYTHONPATH": str(tmp_path)}
    finished = run_forked(tmp_path / "check.py", folder=tmp_path, environment=environment, timeout_s=300)
    assert finished.stdout.splitlines()[-1:] == ["plain conforms"], finished.stderr
