"""Tests the families of causal language models and writes docs/reference/families.md from the results."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hf_engine import load_train_backend
from hf_engine.model_directory import read_model_directory
from hf_engine.rollout.engine_rules import check_sglang_runs, check_vllm_runs
from hf_engine.testing import FURTHER_FAMILIES, TINY_FAMILIES, write_tiny_family
from hf_protocols import BackendError

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "families.md"
TESTS = "packages/hf-engine/tests/test_families.py"
TEST = "test_family_equals_transformers"
VLLM_TESTS = "packages/hf-engine/tests/test_vllm.py"
VLLM_TEST = "test_a_family_that_the_engine_loads_follows_the_training"
SGLANG_TESTS = "packages/hf-engine/tests/test_sglang_families.py"
SGLANG_TEST = "test_a_family_that_the_engine_runs_follows_the_training"
LOADER_TESTS = "packages/hf-engine/tests/test_sglang_loaders.py"
LOADER_TEST = "test_an_update_ends_where_a_load_does"
BEGIN, END = "<!-- families -->\n\n", "\n\n<!-- end of families -->"
FURTHER_BEGIN, FURTHER_END = "<!-- further families -->\n\n", "\n\n<!-- end of further families -->"
FURTHER_HEAD = "| `model_type` | class in transformers | fsdp, transformers |\n" + "|---" * 3 + "|"
ALL = ("-m", "matrix or not matrix")
HEAD = "| `model_type` | class in transformers | fsdp, transformers | vllm | sglang | megatron |\n" + "|---" * 6 + "|"


def main() -> int:
    """Runs the tests, writes the page, and returns the tests' exit status.

    `--further` as the only argument tests the families of the second table alone, which needs no engine.
    """
    if sys.argv[1:] == ["--further"]:
        return write_further()
    given = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        results = run_tests(Path(folder), sys.executable, TESTS, TEST, *ALL, *given, passed="equal")
        python = {engine: str(ROOT / f".venv-{engine}" / "bin" / "python") for engine in ("vllm", "sglang")}
        followed = run_tests(
            Path(folder), python["vllm"], VLLM_TESTS, VLLM_TEST, "-m", "vllm", *given, passed="follows"
        )
        loader = (python["sglang"], LOADER_TESTS, LOADER_TEST)
        engine = (python["sglang"], SGLANG_TESTS, SGLANG_TEST)
        loaded = run_tests(Path(folder), *loader, "-m", "sglang", *given, passed="loads")
        generated = run_tests(Path(folder), *engine, "-m", "sglang", *given, passed="follows")
        loaded |= {family: found for family, found in generated.items() if loaded.get(family) != "differs"}
        table = build_table(results, followed, loaded, Path(folder))
        further = build_further(results, Path(folder))
    put_table(table, BEGIN, END)
    put_table(further, FURTHER_BEGIN, FURTHER_END)
    return int("differs" in table + further)


def write_further() -> int:
    """Tests the families of the second table and writes it; returns the tests' exit status."""
    with tempfile.TemporaryDirectory() as folder:
        tests = (f"{TESTS}::{TEST}[{family}]" for family in FURTHER_FAMILIES)
        results = run_tests(Path(folder), sys.executable, TESTS, TEST, *ALL, passed="equal", only=tests)
        table = build_further(results, Path(folder))
    put_table(table, FURTHER_BEGIN, FURTHER_END)
    return int("differs" in table)


def put_table(table: str, begin: str, end: str) -> None:
    """Writes a table between its marks on the page."""
    before, _, rest = PAGE.read_text().partition(begin)
    PAGE.write_text(f"{before}{begin}{table}{end}{rest.partition(end)[2]}")


def run_tests(
    folder: Path, python: str, tests: str, test: str, *options: str, passed: str, only: Iterable[str] = ()
) -> dict[str, str]:
    """Runs one test of all families, or the cases of it that are given; see `read_results`."""
    report = folder / f"{Path(tests).stem}.xml"
    cases = [*only] or [tests, "-k", test]
    command = [python, "-m", "pytest", *cases, "-q", f"--junitxml={report}", *options]
    subprocess.run(command, cwd=ROOT, check=False)
    return read_results(report, test, passed=passed)


def read_results(report: Path, test: str = TEST, *, passed: str = "equal") -> dict[str, str]:
    """Returns what a test found by family: `passed` or `differs`; nothing where it was skipped."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name, _, rest = case.get("name", "").partition("[")
        if name == test and case.find("skipped") is None:
            failed = case.find("failure") is not None or case.find("error") is not None
            found[rest.removesuffix("]")] = "differs" if failed else passed
    return found


def build_table(
    results: Mapping[str, str], followed: Mapping[str, str], loaded: Mapping[str, str], folder: Path
) -> str:
    """Returns one row for every family that was tested."""
    rows = [HEAD]
    for family in TINY_FAMILIES:
        model = write_tiny_family(folder / family, family)
        files = read_model_directory(model)
        (architecture,) = json.loads((model / "config.json").read_text())["architectures"]
        # Of windows that SGLang leaves out its test has one that no sequence exceeds.
        sglang_rule = partial(check_sglang_runs, max_positions=1)
        rules: list[Any] = [check_vllm_runs, sglang_rule, load_train_backend("megatron").check_model]
        vllm, sglang, megatron = ("takes" if _takes(rule, files) else "" for rule in rules)
        engines = f"{vllm and followed.get(family, vllm)} | {sglang and loaded.get(family, sglang)}"
        others = f"{engines} | {megatron}"
        rows.append(f"| `{family}` | {architecture} | {results.get(family, 'not run')} | {others} |")
    return "\n".join(rows)


def build_further(results: Mapping[str, str], folder: Path) -> str:
    """Returns one row for every family that was tested in `fsdp` with `transformers` alone."""
    rows = [FURTHER_HEAD]
    for family in FURTHER_FAMILIES:
        model = write_tiny_family(folder / family, family)
        (architecture,) = json.loads((model / "config.json").read_text())["architectures"]
        rows.append(f"| `{family}` | {architecture} | {results.get(family, 'not run')} |")
    return "\n".join(rows)


def _takes(rule: Any, files: Any) -> bool:
    try:
        rule(files, on_cpu=False)
    except BackendError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
