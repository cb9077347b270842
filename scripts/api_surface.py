"""Compare the public API with docs/reference/api.txt, which lists it one name a line.

    scripts/api_surface.py            print the lines that were added (+) and removed (-); exits with 1 if there are any
    scripts/api_surface.py --write    write the list

The list has what `__all__` of each package exports: functions with their signatures, classes with their public members.
Everything is read off the source without importing it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "docs" / "reference" / "api.txt"
PACKAGES = ("hf_protocols", "hf_engine", "hf_mapper", "hf_controller", "hf_algorithms")
SOURCES = tuple(ROOT / "packages" / package.replace("_", "-") / "src" for package in PACKAGES)


def read_surface(packages: Sequence[str] = PACKAGES, search_paths: Sequence[Path] = SOURCES) -> list[str]:
    """Returns the lines of the public API, sorted within each package."""
    loader = griffe.GriffeLoader(search_paths=[str(path) for path in search_paths])
    modules = [loader.load(package) for package in packages]
    loader.resolve_aliases(external=True)
    return [line for module in modules for name in sorted(_exports(module)) for line in _describe(module, name)]


def _exports(module: griffe.Object | griffe.Alias) -> list[str]:
    return [name if isinstance(name, str) else name.name for name in module.exports or ()]


def _describe(parent: griffe.Object | griffe.Alias, name: str) -> Iterator[str]:
    """Yields a line for a member, and one for each public member of a class."""
    member, path = parent[name], f"{parent.path}.{name}"
    if member.is_class:
        yield f"{path}({', '.join(map(str, member.bases))})"
        for inner in sorted(member.members):
            if inner == "__init__" or not inner.startswith("_"):
                yield from (f"    {line.removeprefix(member.path + '.')}" for line in _describe(member, inner))
    elif member.is_function:
        yield f"{path}({_describe_parameters(member)}) -> {member.returns}"
    else:
        yield f"{path}: {member.annotation}" if member.annotation else path


def _describe_parameters(function: griffe.Object | griffe.Alias) -> str:
    """Returns a signature's parameters as in source, without `self` and `cls`."""
    shown: list[str] = []
    marks = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}
    has_star = False
    for parameter in function.parameters:
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is griffe.ParameterKind.keyword_only and not has_star:
            shown.append("*")
            has_star = True
        has_star |= parameter.kind is griffe.ParameterKind.var_positional
        annotation = f": {parameter.annotation}" if parameter.annotation is not None else ""
        default = f" = {parameter.default}" if parameter.default is not None and parameter.kind not in marks else ""
        shown.append(f"{marks.get(parameter.kind, '')}{parameter.name}{annotation}{default}")
    return ", ".join(shown)


def compare(listed: Sequence[str], found: Sequence[str]) -> list[str]:
    """Returns the added and removed lines, sorted; the members of a class carry its name."""
    before, after = set(_qualify(listed)), set(_qualify(found))
    return [f"{'-' if line in before else '+'} {line}" for line in sorted(before ^ after)]


def _qualify(lines: Sequence[str]) -> list[str]:
    owner, qualified = "", []
    for line in lines:
        owner = owner if line.startswith(" ") else line.partition("(")[0]
        qualified.append(f"{owner}.{line.strip()}" if line.startswith(" ") else line)
    return qualified


def main(arguments: Sequence[str]) -> int:
    """Prints the difference, or writes the list with `--write`."""
    found = read_surface()
    if "--write" in arguments:
        LIST.write_text("\n".join(found) + "\n")
        return 0
    changes = compare(LIST.read_text().splitlines(), found)
    print("\n".join(changes), end="\n" * bool(changes))
    return 1 if changes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
