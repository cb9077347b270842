"""Rules of the house that no linter knows, each read off the source without importing it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "packages").glob("*/src/**/*.py"))
ALL_PYTHON = sorted(
    path
    for folder in ("packages", "integration-tests", "benchmarks", "examples", "scripts")
    for path in (ROOT / folder).rglob("*.py")
)
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_TEST_NAME = 60
LEFTOVER_NAMES = frozenset({"common", "helpers", "misc", "utils"})
EXECUTOR_BOUNDARY = ("executors/ray/actor.py", "hf_controller/executors/rank_runtime.py")
"""Errors of a rank travel from here to the controller."""
MOST_BROAD_EXCEPTS = 10
USERS_OF_GROUP_INTERNALS = {
    "hf-controller/src/hf_controller/groups/default_group.py",
    "hf-engine/src/hf_engine/process_groups.py",
}
"""One module of a package: a release of torch that changes its internals is met there."""
GROUP_INTERNALS = re.compile(r"c10d\._\w|\bBackend\._\w|\b_get_default_group\b|\._set_group_name\b")
ONLY_USER_OF_RAY_INTERNALS = ROOT / "packages/hf-controller/src/hf_controller/executors/ray/ray_internals.py"
RAY_INTERNALS = re.compile(r"\bray\._\w|\b_raylet\b|\._actor_id\b")
ONLY_CALLER_OF_NEW_GROUP = ROOT / "packages/hf-engine/src/hf_engine/process_groups.py"

each_source = pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "packages")))


def test_no_module_of_leftovers() -> None:
    assert [path for path in SOURCES if LEFTOVER_NAMES & {part.strip("_") for part in path.with_suffix("").parts}] == []


def test_code_is_ascii() -> None:
    assert [path for path in ALL_PYTHON if not path.read_bytes().isascii()] == []


@each_source
def test_sizes(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {node.name: (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions}
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def test_names_of_tests_are_short() -> None:
    names = [
        node.name
        for path in ALL_PYTHON
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and (node.name.startswith("test_") or "testing/_" in str(path))
    ]
    assert len(names) > 2500
    assert [name for name in names if len(name) > MAX_TEST_NAME] == []


def test_a_class_name_means_one_thing() -> None:
    """In tests, benchmarks and scripts, too."""
    places: dict[str, list[str]] = {}
    for path in ALL_PYTHON:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 700
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@each_source
def test_nothing_but_definitions_at_import(path: Path) -> None:
    assert [f"line {node.lineno}" for node in ast.parse(path.read_text()).body if not _is_definition(node)] == []


def _is_definition(node: ast.stmt) -> bool:
    if isinstance(node, ast.If):
        return ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING", "__name__ == '__main__'"}
    if isinstance(node, ast.Expr):  # a docstring, of the module or of the constant above it
        return isinstance(node.value, ast.Constant)
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return isinstance(node, (ast.Import, ast.ImportFrom, *functions, ast.ClassDef, ast.Assign, ast.AnnAssign))


@pytest.mark.parametrize(
    ("line", "allowed"),
    [
        ("'''What it is.'''", True),
        ("LIMIT = 3", True),
        ("if TYPE_CHECKING:\n    import torch", True),
        ("register_all()", False),
        ("for name in NAMES:\n    pass", False),
        ("try:\n    import torch\nexcept ImportError:\n    torch = None", False),
    ],
)
def test_the_rule_on_definitions_sees_the_difference(line: str, allowed: bool) -> None:
    assert _is_definition(ast.parse(line).body[0]) is allowed


def test_broad_excepts_are_few() -> None:
    inside = [path for path in SOURCES if not str(path).endswith(EXECUTOR_BOUNDARY)]
    lines = [
        f"{path.name}:{node.lineno}"
        for path in inside
        for node in ast.walk(ast.parse(path.read_text()))
        if _is_broad(node)
    ]
    lines += ["foreign_code.raised_as", "foreign_code.Caught"]  # which name the classes in variables
    assert len(lines) <= MOST_BROAD_EXCEPTS, lines


def _is_broad(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and ast.unparse(node.func) in {"contextlib.suppress", "suppress"}:
        return any(ast.unparse(each) in {"Exception", "BaseException"} for each in node.args)
    if not isinstance(node, ast.ExceptHandler):
        return False
    caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    return any(each is None or ast.unparse(each) in {"Exception", "BaseException"} for each in caught)


def test_one_module_of_a_package_uses_internals_of_groups() -> None:
    users = {str(path.relative_to(ROOT / "packages")) for path in SOURCES if GROUP_INTERNALS.search(path.read_text())}
    assert users == USERS_OF_GROUP_INTERNALS


def test_one_module_uses_internals_of_ray() -> None:
    users = [path for path in SOURCES if RAY_INTERNALS.search(path.read_text())]
    assert users == [ONLY_USER_OF_RAY_INTERNALS]


def test_one_module_calls_new_group() -> None:
    callers = {path for path in SOURCES for node in ast.walk(ast.parse(path.read_text())) if _calls_new_group(node)}
    assert callers <= {ONLY_CALLER_OF_NEW_GROUP}


def _calls_new_group(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name.startswith("new_group") or name == "new_subgroups"
