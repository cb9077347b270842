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
BEGIN, END = "<!-- families -->\n\n", "\n\n<!-- end of families -->"
HEAD = "| `model_type` | class in transformers | fsdp, transformers | vllm | sglang | megatron |\n" + "|---" * 6 + "|"


def main() -> int:
    """Runs the tests, writes the page, and returns the tests' exit status."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        tested = subprocess.run(
            [sys.executable, "-m", "pytest", TESTS, "-q", f"--junitxml={report}", *sys.argv[1:]], cwd=ROOT, check=False
        )
        results = read_results(report)
        table = build_table(results, Path(folder))
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table}{END}{rest.partition(END)[2]}")
    return tested.returncode


def read_results(report: Path) -> dict[str, str]:
    """Returns `equal` or `differs` by family, as the tests ended."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name, _, rest = case.get("name", "").partition("[")
        if name == "test_family_equals_transformers":
            failed = case.find("failure") is not None or case.find("error") is not None
            found[rest.removesuffix("]")] = "differs" if failed else "equal"
    return found


def build_table(results: Mapping[str, str], folder: Path) -> str:
    """Returns one row for every family that was tested."""
    rows = [HEAD]
    for family in TINY_FAMILIES:
        model = write_tiny_family(folder / family, family)
        files = read_model_directory(model)
        (architecture,) = json.loads((model / "config.json").read_text())["architectures"]
        rules: list[Any] = [check_vllm_runs, check_sglang_runs, load_train_backend("megatron").check_model]
        others = " | ".join("takes" if _takes(rule, files) else "" for rule in rules)
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
