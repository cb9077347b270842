"""The two walks of docs/concepts name functions that exist, and count their hops."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOP = re.compile(r"^\| (?:(\d+|-) \| )?\[`(\w+)(/[\w/]+\.py)`\]\((?P<link>[^)]+)\) \| `([\w.]+)` \|", re.MULTILINE)


HOOK = runpy.run_path(str(ROOT / "scripts" / "source_pages.py"))


@pytest.mark.parametrize("name", ["one-batch", "one-weight"])
def test_walk_names_functions_that_exist(name: str) -> None:
    page = (ROOT / "docs" / "concepts" / f"{name}.md").read_text()
    hops = HOP.findall(page)
    numbers = [int(number) for number, *_ in hops if number.isdecimal()]
    assert numbers == list(range(1, len(numbers) + 1)) and numbers
    assert f"The walk takes {len(numbers)} hops" in page
    opened: list[str] = []
    for number, package, path, *_ in hops:
        assert number != "-" or f"{package}{path}" in opened, f"{path} is not open yet: it is a hop"
        opened.append(f"{package}{path}" if number else "")
    absent = [f"{package}{path} {unit}" for _, package, path, _, unit in hops if unit not in _list_units(package, path)]
    assert absent == [], f"docs/concepts/{name}.md has hops that are gone. Name their new places"
    for _, package, path, link, _ in hops:
        assert link == f"../../packages/{package.replace('_', '-')}/src/{package}{path}"


def test_walks_link_to_pages_that_show_the_code() -> None:
    """As MkDocs calls the hook: a file's page, and the line of a name in it."""
    path = "packages/hf-controller/src/hf_controller/data/gather.py"
    row = f"| 7 | [`gather.py`](../../{path}) | `BatchReader.read` | text |\nSee [it](../../{path})."
    page = SimpleNamespace(file=SimpleNamespace(src_uri="concepts/one-batch.md"))
    there = "../source/hf_controller/data/gather.md"
    assert HOOK["on_page_markdown"](row, page, None, None).splitlines() == [
        f"| 7 | [`gather.py`]({there}) | [`BatchReader.read`]({there}#batchreader-read) | text |",
        f"See [it]({there}).",
    ]
    shown = HOOK["show"](path, ["BatchReader.read", "Assembly"])
    line = HOOK["list_lines"](path)["BatchReader.read"]
    heading = f'## `BatchReader.read` {{ #batchreader-read }}\n\n`````python linenums="{line}"\n    def read('
    assert heading in shown and "## `Assembly` { #assembly }" in shown
    code = re.findall(r"^`````python.*?\n(.*?)^`````$", shown, re.MULTILINE | re.DOTALL)
    assert "".join(code) == (ROOT / path).read_text()


def _list_units(package: str, path: str) -> set[str]:
    """Returns the functions, classes, methods and constants of a file by qualified name."""
    file = f"packages/{package.replace('_', '-')}/src/{package}{path}"
    return set(HOOK["list_lines"](file)) if (ROOT / file).is_file() else set()


def test_architecture_questions_have_answers_that_exist() -> None:
    page = (ROOT / "docs" / "concepts" / "architecture.md").read_text()
    answers = tomllib.loads((ROOT / "integration-tests" / "architecture_answers.toml").read_text())["answers"]
    assert re.findall(r"^\d+\. (.*)$", page, re.MULTILINE) == [each["question"] for each in answers]
    split = [(each["file"].partition("/"), each["name"]) for each in answers]
    absent = [
        f"{package}/{rest} {name}" for (package, _, rest), name in split if name not in _list_units(package, f"/{rest}")
    ]
    assert absent == [], "architecture_answers.toml has answers that are gone. Name their new places"
    # The page leads to each answer: it names the package, and the file or the folder in which the file is.
    for (package, _, rest), _ in split:
        assert f"**`{package}/`**" in page
        assert f"`{rest.partition('/')[0]}{'/' * ('/' in rest)}`" in page, rest
