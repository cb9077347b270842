"""The quickstart's PPO on two raylets: what moves between them is what the routes say, and losing one ends the run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM

from small_runs import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

HERE = Path(__file__).resolve().parent


def run_program(what: str, run: Path) -> dict[str, str]:
    """The last line that starts with each word. No process of its cluster stays."""
    command = [sys.executable, str(HERE / "two_nodes.py"), what, str(run)]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = dict(line.split(" ", 1) for line in ended.stdout.splitlines() if " " in line)
    _, left = psutil.wait_procs([each for each in psutil.process_iter() if _works_in(each, lines["session"])], 20)
    assert left == []
    return lines


def _works_in(process: psutil.Process, folder: str) -> bool:
    try:
        return any(file.path.startswith(folder) for file in process.open_files())
    except psutil.Error:
        return False


def test_the_bytes_between_the_nodes_are_those_of_the_routes(tmp_path: Path) -> None:
    lines = run_program("count", tmp_path / "run")
    assert int(lines["moved"]) > 10_000
    assert [row["iteration"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_lost_node_ends_the_run_with_its_rank_and_last_model(tmp_path: Path) -> None:
    lines = run_program("lose", tmp_path / "run")
    kind, message = json.loads(lines["lost"])
    assert kind == "RemoteCallError"
    assert re.search(r"process \w+/\d is gone: .*given last: call \d+ ", message), message
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["error"]["type"], summary["error"]["message"]) == ("failed", kind, message)
    assert summary["iterations"] == summary["model_iteration"] == len(read_metrics(tmp_path / "run")) == 2
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
