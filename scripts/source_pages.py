"""A hook of MkDocs: links of pages to source files lead to pages of the site that show the file.

A page links to `../../packages/.../file.py`, which a viewer of the repository opens. In the site the link leads to a
page with the file's text. In a table row whose next cell is the name of a function or class, that name becomes a link
to a heading above it.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\((?:\.\./)+(packages/[\w-]+/src/[\w/]+\.py)\)")
NAMED = re.compile(LINK.pattern + r" \| `([\w.]+)`")


def on_files(files: Any, config: Any) -> Any:
    """Adds a page for each source file that some page links to."""
    from mkdocs.structure.files import File

    pages = [Path(file.abs_src_path).read_text() for file in files.documentation_pages() if file.abs_src_path]
    linked = {path for page in pages for path in LINK.findall(page)}
    named = {each for page in pages for each in NAMED.findall(page)}
    for path in sorted(linked):
        units = [unit for place_, unit in named if place_ == path]
        files.append(File.generated(config, place(path), content=show(path, units)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrites the links to the site's own pages."""
    here = posixpath.dirname(page.file.src_uri)

    def lead(path: str) -> str:
        return posixpath.relpath(place(path), here)

    def name(match: re.Match[str]) -> str:
        path, unit = match.groups()
        return f"]({lead(path)}) | [`{unit}`]({lead(path)}#{slug(unit)})"

    return LINK.sub(lambda match: f"]({lead(match[1])})", NAMED.sub(name, markdown))


def place(path: str) -> str:
    """Returns where the site has the page of a source file."""
    return f"source/{path.partition('/src/')[2].removesuffix('.py')}.md"


def show(path: str, units: Collection[str]) -> str:
    """Returns the page of a source file, with a heading above each of `units`; the site's search leaves it out."""
    lines, known = (ROOT / path).read_text().splitlines(keepends=True), list_lines(path)
    places = sorted((known[unit], unit) for unit in units)
    parts = [f"---\nsearch:\n  exclude: true\n---\n# `{path.partition('/src/')[2]}`\n"]
    borders = [(1, ""), *places, (len(lines) + 1, "")]
    for (start, unit), (stop, _) in pairwise(borders):
        heading = f"\n## `{unit}` {{ #{slug(unit)} }}\n" if unit else ""
        parts.append(f'{heading}\n`````python linenums="{start}"\n{"".join(lines[start - 1 : stop - 1])}`````\n')
    return "".join(parts)


def slug(unit: str) -> str:
    """Returns the anchor of a heading."""
    return re.sub(r"[\W_]+", "-", unit).strip("-").lower()


def list_lines(path: str) -> dict[str, int]:
    """Returns the first lines of a file's functions, classes, methods and constants, by their qualified names."""
    lines: dict[str, int] = {}
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            lines |= {target.id: node.lineno for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, _DEFINITIONS):
            lines[node.name] = _first_line(node)
        if isinstance(node, ast.ClassDef):
            inner = [each for each in node.body if isinstance(each, _DEFINITIONS)]
            lines |= {f"{node.name}.{each.name}": _first_line(each) for each in inner}
    return lines


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _first_line(node: Any) -> int:
    """Returns the line of the first decorator, or of the definition."""
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])
