"""The two walks of docs/concepts name functions that exist, and count their hops."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOP = re.compile(r"^\| (?:(\d+|-) \| )?`(\w+)(/[\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)


@pytest.mark.parametrize("name", ["one-batch", "one-weight"])
def test_walk_names_functions_that_exist(name: str) -> None:
    page = (ROOT / "docs" / "concepts" / f"{name}.md").read_text()
    hops = HOP.findall(page)
    numbers = [int(number) for number, *_ in hops if number.isdecimal()]
    assert numbers == list(range(1, len(numbers) + 1)) and numbers
    assert f"The walk takes {len(numbers)} hops" in page
    absent = [f"{package}{path} {unit}" for _, package, path, unit in hops if unit not in _list_units(package, path)]
    assert absent == [], f"docs/concepts/{name}.md: name the new place of these hops"


def _list_units(package: str, path: str) -> set[str]:
    """Returns the functions, classes, methods and constants of a file by qualified name."""
    file = ROOT / "packages" / package.replace("_", "-") / "src" / f"{package}{path}"
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body if file.is_file() else ():
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def test_architecture_questions_have_answers_that_exist() -> None:
    page = (ROOT / "docs" / "concepts" / "architecture.md").read_text()
    answers = tomllib.loads((ROOT / "integration-tests" / "architecture_answers.toml").read_text())["answers"]
    assert re.findall(r"^\d+\. (.*)$", page, re.MULTILINE) == [each["question"] for each in answers]
    split = [(each["file"].partition("/"), each["name"]) for each in answers]
    absent = [
        f"{package}/{rest} {name}" for (package, _, rest), name in split if name not in _list_units(package, f"/{rest}")
    ]
    assert absent == [], "integration-tests/architecture_answers.toml: name the new place of these answers"
    # The page leads to each answer: it names the package, and the file or the folder in which the file is.
    for (package, _, rest), _ in split:
        assert f"**`{package}/`**" in page
        assert f"`{rest.partition('/')[0]}{'/' * ('/' in rest)}`" in page, rest
