"""Every lane of `.ci/run` has a budget, and the report after a run says what each took, however the run ended."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "scripts" / "ci_budget.py"
MAKEFILE = """
env check docs wheels test-vllm test-sglang test-trackers:
\t@echo "made $@"
test:
\t@echo "a test failed" >&2; exit 1
"""


@pytest.fixture(scope="module")
def ci_budget() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ci_budget", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_lane_has_a_budget_and_all_fit_together(ci_budget: ModuleType) -> None:
    lanes = re.findall(r"^lane (\w.*)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert list(ci_budget.BUDGETS_S) == lanes
    assert ci_budget.BUDGETS_S["test"] <= 10 * 60
    assert sum(ci_budget.BUDGETS_S.values()) <= 50 * 60


def test_a_report_shows_each_lane_next_to_its_budget(ci_budget: ModuleType) -> None:
    lines = ["env\tstarted", "env\tpassed\t30\t21", "test\tstarted", "test\tFAILED\t615\t900", "test-slow\tstarted"]
    rows = [line.split() for line in ci_budget.format_report(ci_budget.read_lanes(lines))]
    assert ["env", "passed", "30", "40", "21"] in rows
    assert ["test", "FAILED", "615", "600", "900", "OVER", "BUDGET", "by", "15", "s"] in rows
    assert ["test-slow", "CUT", "OFF", "-", "1440", "-"] in rows
    assert ["check", "docs", "wheels", "not", "run", "-", "80", "-"] in rows
    assert ["together", "in", "part", "645", str(sum(ci_budget.BUDGETS_S.values())), "921"] in rows


def test_a_lane_without_a_budget_is_reported_too(ci_budget: ModuleType) -> None:
    report = "\n".join(ci_budget.format_report(ci_budget.read_lanes(["bench\tpassed\t5\t4"])))
    assert re.search(r"^bench +passed +5 +- +4$", report, re.MULTILINE)


def test_a_run_without_lanes_is_reported_in_one_line(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, PROGRAM, tmp_path / "absent"], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr == f"{tmp_path / 'absent'}: no lanes are written there. Run .ci/run first\n"


def test_a_run_that_fails_half_way_ends_with_the_report(tmp_path: Path) -> None:
    for name in (".ci/run", "scripts/ci_budget.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "Makefile").write_text(MAKEFILE)
    browser = tmp_path / "bin" / "chromium"  # none is installed for this test
    browser.parent.mkdir()
    browser.write_text("#!/bin/sh\n")
    browser.chmod(0o755)
    environment = {**os.environ, "PATH": f"{browser.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ended = subprocess.run(
        [tmp_path / ".ci" / "run"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert "made docs" in ended.stdout and "a test failed" in ended.stderr
    assert re.search(r"^check docs wheels +passed ", ended.stdout, re.MULTILINE)
    assert re.search(r"^test +FAILED ", ended.stdout, re.MULTILINE)
    assert re.search(r"^test-slow +not run ", ended.stdout, re.MULTILINE)
    assert ended.stdout.splitlines()[-1].startswith("exit status 2 after ")
