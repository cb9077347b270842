"""Tests the families of causal language models and writes docs/reference/families.md from the results."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_engine import load_train_backend
from hf_engine.backends._engine_rules import check_sglang_runs, check_vllm_runs
from hf_engine.model_directory import read_model_directory
from hf_engine.testing import TINY_FAMILIES, write_tiny_family
from hf_protocols import BackendError

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "families.md"
TESTS = "packages/hf-engine/tests/test_families.py"
TEST = "test_family_equals_transformers"
VLLM_TESTS = "packages/hf-engine/tests/test_vllm.py"
VLLM_TEST = "test_a_family_that_the_engine_loads_follows_its_training_weights"
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
BEGIN, END = "<!-- families -->\n\n", "\n\n<!-- end of families -->"
HEAD = "| `model_type` | class in transformers | fsdp, transformers | vllm | sglang | megatron |\n" + "|---" * 6 + "|"


def main() -> int:
    """Runs the tests, writes the page, and returns the tests' exit status."""
    with tempfile.TemporaryDirectory() as folder:
        report, engine_report = Path(folder) / "report.xml", Path(folder) / "vllm.xml"
        failed = run_tests(sys.executable, TESTS, report)
        failed |= run_tests(str(VLLM_PYTHON), VLLM_TESTS, engine_report, "-m", "vllm", "-k", VLLM_TEST)
        results, followed = read_results(report), read_results(engine_report, VLLM_TEST, passed="follows")
        table = build_table(results, followed, Path(folder))
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table}{END}{rest.partition(END)[2]}")
    return failed


def run_tests(python: str, tests: str, report: Path, *options: str) -> int:
    """Returns the exit status of the tests, which leave a report."""
    command = [python, "-m", "pytest", tests, "-q", f"--junitxml={report}", *options, *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def read_results(report: Path, test: str = TEST, *, passed: str = "equal") -> dict[str, str]:
    """Returns what a test found by family: `passed` or `differs`; nothing where it was skipped."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name, _, rest = case.get("name", "").partition("[")
        if name == test and case.find("skipped") is None:
            failed = case.find("failure") is not None or case.find("error") is not None
            found[rest.removesuffix("]")] = "differs" if failed else passed
    return found


def build_table(results: Mapping[str, str], followed: Mapping[str, str], folder: Path) -> str:
    """Returns one row for every family that was tested."""
    rows = [HEAD]
    for family in TINY_FAMILIES:
        model = write_tiny_family(folder / family, family)
        files = read_model_directory(model)
        (architecture,) = json.loads((model / "config.json").read_text())["architectures"]
        rules: list[Any] = [check_vllm_runs, check_sglang_runs, load_train_backend("megatron").check_model]
        vllm, sglang, megatron = ("takes" if _takes(rule, files) else "" for rule in rules)
        others = f"{vllm and followed.get(family, vllm)} | {sglang} | {megatron}"
        rows.append(f"| `{family}` | {architecture} | {results.get(family, 'not run')} | {others} |")
    return "\n".join(rows)


def _takes(rule: Any, files: Any) -> bool:
    try:
        rule(files, on_cpu=False)
    except BackendError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
