"""Find the expressions of scripts/wording.toml in docstrings, comments, other strings, names of tests and pages.

Of shell scripts, YAML files, the Makefile and pyproject.toml the comments are read.

    scripts/wording.py            the paths that the file holds free of them
    scripts/wording.py PATH...    these files and folders

Prints one line for each hit and exits with 1 if there is any.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RULES = ROOT / "scripts" / "wording.toml"


@dataclass(frozen=True, kw_only=True)
class Forbidden:
    """A forbidden pattern, and the kinds of text in which it is forbidden; without kinds, in all."""

    pattern: re.Pattern[str]
    instead: str
    where: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Text:
    """One docstring, comment, string or paragraph, and the line on which it begins."""

    kind: str
    line: int
    content: str


@dataclass(frozen=True, kw_only=True)
class Hit:
    """An expression at a line of a file."""

    path: Path
    line: int
    found: str
    instead: str

    def __str__(self) -> str:
        """Returns the hit as an editor's link and the words to use instead."""
        shown = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{shown}:{self.line}: {' '.join(self.found.split())!r}: write {self.instead}"


def read_rules(path: Path = RULES) -> tuple[tuple[str, ...], tuple[Forbidden, ...]]:
    """Returns the paths that are held free of hits, and the expressions."""
    rules = tomllib.loads(path.read_text())
    expressions = tuple(
        Forbidden(
            # One space of a pattern stands for any white space, so that a phrase is found across a line break.
            pattern=re.compile(each["pattern"].replace(" ", r"\s+"), re.IGNORECASE),
            instead=each["instead"],
            where=tuple(each.get("where", ())),
        )
        for each in rules["expressions"]
    )
    return tuple(rules["holds"]), expressions


def list_files(paths: Sequence[Path]) -> list[Path]:
    """Returns the files with text at or below the paths, sorted; hidden folders are left out."""
    found = {path for path in paths if path.is_file()}
    for path in paths:
        for each in path.rglob("*"):
            if each.suffix in _SUFFIXES and not any(part.startswith(".") for part in each.relative_to(path).parts):
                found.add(each)
    return sorted(found)


_SUFFIXES = {".md", ".py", ".sh", ".yaml", ".yml"}


def find_hits(path: Path, expressions: Sequence[Forbidden]) -> list[Hit]:
    """Returns the hits in one file, in order of lines."""
    source = path.read_text()
    hits = [
        Hit(
            path=path,
            line=text.line + text.content.count("\n", 0, match.start()),
            found=match.group(),
            instead=expression.instead,
        )
        for text in {".py": read_python, ".md": read_page}.get(path.suffix, read_comments)(source)
        for expression in expressions
        if not expression.where or text.kind in expression.where
        for match in expression.pattern.finditer(text.content)
    ]
    return sorted(hits, key=lambda hit: hit.line)


def read_python(source: str) -> Iterator[Text]:
    """Yields the docstrings, other strings and comments of a Python file, and the names of its tests as words."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield Text(kind="name", line=node.lineno, content=node.name.replace("_", " "))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Expr | ast.JoinedStr | ast.Constant)]
    documented = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield Text(kind="message", line=node.lineno, content="".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            kind = "docstring" if id(node) in documented else "message"
            yield Text(kind=kind, line=node.lineno, content=node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(kind="comment", line=token.start[0], content=token.string)


def read_page(source: str) -> Iterator[Text]:
    """Yields the paragraphs of a Markdown page."""
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", source):
        if paragraph.strip():
            yield Text(kind="page", line=line, content=paragraph)
        line += paragraph.count("\n")


def read_comments(source: str) -> Iterator[Text]:
    """Yields the comments of a file in which `#` begins one, neighbouring lines together."""
    for block in re.finditer(r"(?:^[ \t]*#.*\n?)+|(?<=\s)#.*", source, re.MULTILINE):
        content = re.sub(r"^[ \t]*#+", "", block.group(), flags=re.MULTILINE)
        yield Text(kind="comment", line=source.count("\n", 0, block.start()) + 1, content=content)


def main(arguments: Sequence[str]) -> int:
    """Prints the hits in the given paths, or in those that the rules hold."""
    holds, expressions = read_rules()
    paths = [Path(each).resolve() for each in arguments] or [ROOT / each for each in holds]
    missing = [path for path in paths if not path.exists()]
    if missing:
        print(f"{', '.join(map(str, missing))}: no such file or directory", file=sys.stderr)
        return 2
    hits = [hit for path in list_files(paths) for hit in find_hits(path, expressions)]
    print("\n".join(map(str, hits)), end="\n" * bool(hits))
    return 1 if hits else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
