"""The whole matrix of training layouts and engines, in every environment, with a dated result.

Runs `packages/hf-engine/tests/test_matrix.py` with the programs of `.venv` and `.venv-<engine>`, the slow pairs too,
and writes what became of each pair to `results/matrix.json`, without times: the machine may have other work.
`make test-matrix` sets the environments up first. Exits with 1 if a pair fails, or an environment is missing or runs
none.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from engine_programs import ROOT, read_engine_versions
from measurement import record

TESTS = "packages/hf-engine/tests/test_matrix.py::test_generation_is_that_of_the_exported_model"
ENVIRONMENTS = {
    "": "not vllm and not sglang",
    "-vllm": "vllm",
    "-sglang": "sglang",
}
"""Suffix of the environment's folder, and the pairs that it runs."""


def main() -> int:
    """Run every environment's pairs; 1 if one fails."""
    metrics: dict[str, tuple[float, str]] = {}
    failed = []
    for suffix, marks in ENVIRONMENTS.items():
        for name, outcome, seconds in _run(f".venv{suffix}", marks):
            metrics[name] = (float(outcome == "passed"), "passed")
            if outcome != "passed":
                failed.append(name)
            print(f"{outcome:8} {name} ({seconds:.1f} s)")
    record("matrix", metrics, versions=read_engine_versions())
    print(f"{len(metrics) - len(failed)} of {len(metrics)} pairs passed")
    return 1 if failed else 0


def _run(environment: str, marks: str) -> list[tuple[str, str, float]]:
    """Name, outcome and seconds of every pair; ends the program where pytest runs none."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [f"{environment}/bin/pytest", TESTS, "-m", marks, "-q", "--junitxml", str(report)]
        if not (ROOT / command[0]).exists():
            sys.exit(f"{command[0]} is not there. Set it up with scripts/env.sh {environment.removeprefix('.venv-')}")
        finished = subprocess.run(command, cwd=ROOT, check=False)
        if finished.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not report.exists():
            sys.exit(f"{' '.join(command)} ended with {finished.returncode}: it did not run the pairs")
        return [
            (
                case.attrib["name"].partition("[")[2].rstrip("]"),
                next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed"),
                float(case.attrib["time"]),
            )
            for case in ET.parse(report).iter("testcase")
        ]


if __name__ == "__main__":
    sys.exit(main())
