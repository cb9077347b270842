"""Count the house: sizes, imports, names and wording, as tables in docs/concepts/architecture.md.

    scripts/house_numbers.py            write the tables between the page's markers
    scripts/house_numbers.py --list     print in addition every cycle, single importer, name and broad except

Everything is read off the source without importing it, so that the numbers do not depend on what is installed.
"""

from __future__ import annotations

import ast
import io
import re
import runpy
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "concepts" / "architecture.md"
BEGIN = "<!-- house_numbers.py writes from here -->"
END = "<!-- house_numbers.py writes to here -->"
PACKAGES = ("hf-protocols", "hf-engine", "hf-mapper", "hf-controller", "hf-algorithms")
LONGEST_NAME = 60

ONE_OF_A_SET = re.compile(
    r"\.(recipes|training\.(fsdp|megatron)|rollout\.(server|sglang|transformers|vllm)|rewards|trackers)"
    r"(\.|$)|cli$|command|__main__$"
)
"""Modules that one registry or command imports by design: one importer is what they need."""

READERS = re.compile(r"\.data\._(arrow_tables|gsm8k|gzip_files|json_records|text_blocks|text_tables)$")


@dataclass(kw_only=True)
class Module:
    """One source file: its tree and the imports in it."""

    name: str
    package: str
    path: Path
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed source."""
        return ast.parse(self.source)

    @property
    def is_folder(self) -> bool:
        """True for an `__init__.py`."""
        return self.path.name == "__init__.py"

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """All functions and methods, nested ones included."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    @property
    def documented_lines(self) -> int:
        """Lines of docstrings, those of attributes included."""
        texts = [node.value for node in ast.walk(self.tree) if isinstance(node, ast.Expr)]
        return sum(
            (text.end_lineno or text.lineno) - text.lineno + 1
            for text in texts
            if isinstance(text, ast.Constant) and isinstance(text.value, str)
        )

    @property
    def comment_lines(self) -> int:
        """Lines that are a comment from their first character on."""
        tokens = tokenize.generate_tokens(io.StringIO(self.source).readline)
        return sum(token.type == tokenize.COMMENT and token.line.lstrip().startswith("#") for token in tokens)


@dataclass(kw_only=True)
class House:
    """All source modules of a repository, by dotted name."""

    root: Path
    modules: dict[str, Module]
    _resolved: dict[tuple[str, str], str] = field(default_factory=dict)

    def imports(self, module: Module, *, lazy: bool, resolved: bool = True) -> set[str]:
        """Returns the modules of the house that a module imports; with `lazy`, also inside functions and for types.

        A name that a folder passes on counts as an import of the module that defines it; without `resolved`, of the
        folder.
        """
        nodes = ast.walk(module.tree) if lazy else iter(module.tree.body)
        found = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names if alias.name in self.modules}
            elif isinstance(node, ast.ImportFrom) and node.module in self.modules:
                names = [(node.module, alias.name) for alias in node.names]
                found |= {self.resolve(*name) if resolved else self._find_named(*name) for name in names}
        return found - {module.name}

    def resolve(self, module: str, name: str) -> str:
        """Returns the module that defines `name`: a submodule, or the one from which a folder imports it."""
        key = (module, name)
        if key not in self._resolved:
            self._resolved[key] = found = self._find_named(module, name)
            if found == module and self.modules[module].is_folder:
                for node in self.modules[module].tree.body:
                    names = [alias.asname or alias.name for alias in getattr(node, "names", ())]
                    if isinstance(node, ast.ImportFrom) and name in names and node.module in self.modules:
                        self._resolved[key] = self.resolve(node.module, name)
        return self._resolved[key]

    def _find_named(self, module: str, name: str) -> str:
        return f"{module}.{name}" if f"{module}.{name}" in self.modules else module

    def find_circles(self, *, lazy: bool) -> list[list[str]]:
        """Returns the modules that import one another, also by way of what a folder passes on."""
        return find_cycles({each.name: self.imports(each, lazy=lazy, resolved=False) for each in self.modules.values()})


def read_house(root: Path = ROOT) -> House:
    """Reads `packages/*/src` below a root."""
    modules = {}
    for package in sorted((root / "packages").iterdir()) if (root / "packages").is_dir() else ():
        for path in sorted((package / "src").rglob("*.py")):
            parts = path.relative_to(package / "src").with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules[name] = Module(name=name, package=package.name, path=path, source=path.read_text())
    return House(root=root, modules=modules)


def find_cycles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Returns the strongly connected components of more than one module, sorted (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(edges.get(name, ())):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            start = stack.index(name)
            found.append(sorted(stack[start:]))
            del stack[start:]

    for name in sorted(edges):
        if name not in index:
            visit(name)
    return sorted(component for component in found if len(component) > 1)


def find_single_importers(house: House) -> dict[str, str]:
    """Returns the modules that exactly one other module imports, and that one; registries' members are left out."""
    importers: dict[str, set[str]] = defaultdict(set)
    for module in house.modules.values():
        for name in house.imports(module, lazy=True):
            importers[name].add(module.name)
    return {
        name: min(importers[name])
        for name, module in sorted(house.modules.items())
        if len(importers[name]) == 1
        and not module.is_folder
        and not ONE_OF_A_SET.search(name)
        and not READERS.search(name)
    }


def find_shared_names(house: House) -> dict[str, list[str]]:
    """Returns the class names that two or more modules define at their top level, and those modules."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in house.modules.values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module.name)
    return {name: modules for name, modules in sorted(places.items()) if len(modules) > 1}


def find_broad_excepts(module: Module) -> list[int]:
    """Returns the lines that catch, or suppress, `Exception`, `BaseException` or everything."""
    return sorted(
        node.lineno
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ExceptHandler | ast.Call) and any(name in _BROAD for name in _caught_by(node))
    )


_BROAD = {"Exception", "BaseException", "everything"}


def _caught_by(node: ast.ExceptHandler | ast.Call) -> Iterator[str]:
    if isinstance(node, ast.ExceptHandler):
        yield from _caught(node.type)
    elif ast.unparse(node.func) in {"contextlib.suppress", "suppress"}:
        yield from (name for each in node.args for name in _caught(each))


def _caught(node: ast.expr | None) -> Iterator[str]:
    if node is None:
        yield "everything"
    elif isinstance(node, ast.Tuple):
        yield from (name for part in node.elts for name in _caught(part))
    elif isinstance(node, ast.Name):
        yield node.id


def list_tests(root: Path, package: str | None = None) -> list[str]:
    """Returns the names of all test functions, or of one package's."""
    folders = [root / "packages" / package] if package else [root / "packages", root / "integration-tests"]
    files = [path for folder in folders for path in sorted(folder.glob("**/tests/**/test_*.py"))]
    return [
        name for path in files for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    ]


def build_sizes(house: House) -> Iterator[str]:
    """Yields the table of sizes, a row for each package."""
    heads = ("modules", "lines", "file: median / p90 / max", "function: median / p95 / max", "docstrings", "comments")
    yield f"| package | {' | '.join(heads)} | tests : source |"
    yield "|---|--:|--:|---|---|--:|--:|--:|"
    for package in (*PACKAGES, None):
        modules = [each for each in house.modules.values() if package in (None, each.package)]
        if not modules:
            continue
        files = [each.source.count("\n") for each in modules]
        functions = [(node.end_lineno or 0) - node.lineno + 1 for each in modules for node in each.functions] or [0]
        pattern = f"packages/{package or '*'}/tests/**/*.py"
        tests = sum(path.read_text().count("\n") for path in house.root.glob(pattern))
        lines = sum(files)
        cells = (
            package or "**all**",
            f"{len(modules)}",
            f"{lines:,}",
            f"{statistics.median(files):.0f} / {_quantile(files, 0.9)} / {max(files)}",
            f"{statistics.median(functions):.0f} / {_quantile(functions, 0.95)} / {max(functions)}",
            f"{100 * sum(each.documented_lines for each in modules) / lines:.1f} %",
            f"{100 * sum(each.comment_lines for each in modules) / lines:.1f} %",
            f"{tests / lines:.2f}",
        )
        yield f"| {' | '.join(cells)} |"


def _quantile(values: Sequence[int], part: float) -> int:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def build_rooms(house: House) -> Iterator[str]:
    """Yields the table of rooms, largest first: a package's folders and their subfolders."""
    yield "| lines by folder | largest first; modules at the top of the package are left out |"
    yield "|---|---|"
    for package in PACKAGES:
        rooms: Counter[str] = Counter()
        for module in house.modules.values():
            parts = module.name.split(".")
            folders = parts[1:] if module.is_folder else parts[1:-1]
            if module.package == package and folders:
                rooms["/".join(folders)] += module.source.count("\n")
        if rooms:
            shown = sorted(rooms.items(), key=lambda item: (-item[1], item[0]))
            yield f"| in {package} | {', '.join(f'`{name}` {lines:,}' for name, lines in shown)} |"


def build_measures(house: House) -> Iterator[str]:
    """Yields the table of measures, one a row, with a column for each package."""
    by_package = {package: [m for m in house.modules.values() if m.package == package] for package in PACKAGES}
    wording = runpy.run_path(str(Path(__file__).with_name("wording.py")))
    single, shared = find_single_importers(house), find_shared_names(house)
    cycles = {lazy: house.find_circles(lazy=lazy) for lazy in (False, True)}

    def per_package(count: Callable[[str], int]) -> list[int]:
        return [count(package) for package in PACKAGES]

    def in_package(names: Sequence[str], package: str) -> int:
        return sum(house.modules[name].package == package for name in names)

    def in_sources(count: Callable[[Module], int]) -> list[int]:
        return per_package(lambda package: sum(count(module) for module in by_package[package]))

    rows: list[tuple[str, list[int]]] = [
        ("import cycles at module level", per_package(lambda p: in_package([each[0] for each in cycles[False]], p))),
        (
            "import cycles, lazy and type imports counted",
            per_package(lambda p: in_package([c[0] for c in cycles[True]], p)),
        ),
        ("modules with one importer", per_package(lambda p: in_package(list(single), p))),
        ("class names with two meanings", per_package(lambda p: in_package([each[0] for each in shared.values()], p))),
        ("exported names", in_sources(_count_exported)),
        ("broad `except`", in_sources(lambda module: len(find_broad_excepts(module)))),
        ("imports inside functions", in_sources(_count_lazy_imports)),
        (
            "functions without a return type",
            in_sources(lambda module: sum(node.returns is None for node in module.functions)),
        ),
        ("`raise` statements", in_sources(lambda module: _count(module, ast.Raise))),
        ("`assert` statements", in_sources(lambda module: _count(module, ast.Assert))),
        (
            "`noqa` and `type: ignore`",
            in_sources(lambda module: len(re.findall(r"# noqa|# type: ignore", module.source))),
        ),
        ("test functions", per_package(lambda package: len(list_tests(house.root, package)))),
        (f"test names over {LONGEST_NAME} characters", per_package(lambda p: _count_long(list_tests(house.root, p)))),
        (
            "forbidden expressions, tests included",
            per_package(lambda package: _count_hits(house.root, package, wording)),
        ),
    ]
    yield f"| measure | {' | '.join(PACKAGES)} | all |"
    yield f"|---|{'--:|' * (len(PACKAGES) + 1)}"
    for name, counts in rows:
        yield f"| {name} | {' | '.join(map(str, counts))} | {sum(counts)} |"


def _count(module: Module, kind: type[ast.AST]) -> int:
    return sum(isinstance(node, kind) for node in ast.walk(module.tree))


def _count_exported(module: Module) -> int:
    """Names in `__all__` of a package's top."""
    if module.name.count(".") or not module.is_folder:
        return 0
    lists = [
        node.value
        for node in module.tree.body
        if isinstance(node, ast.Assign) and "__all__" in map(ast.unparse, node.targets)
    ]
    return sum(len(each.elts) for each in lists if isinstance(each, ast.List))


def _count_lazy_imports(module: Module) -> int:
    inside = {id(node): node for function in module.functions for node in ast.walk(function)}
    return sum(isinstance(node, ast.Import | ast.ImportFrom) for node in inside.values())


def _count_long(names: Sequence[str]) -> int:
    return sum(len(name) > LONGEST_NAME for name in names)


def _count_hits(root: Path, package: str, wording: dict[str, Any]) -> int:
    _, expressions = wording["read_rules"]()
    return sum(
        len(wording["find_hits"](path, expressions)) for path in wording["list_files"]([root / "packages" / package])
    )


def build_fans(house: House) -> Iterator[str]:
    """Yields the modules with the most imports and the most importers."""
    edges = {module.name: house.imports(module, lazy=True) for module in house.modules.values()}
    importers = Counter(name for found in edges.values() for name in found)
    imports = Counter({name: len(found) for name, found in edges.items()})
    mean = sum(imports.values()) / max(1, len(imports))
    yield (
        f"A module imports {mean:.1f} others on average. Most imports: {_most(imports)}. Most importers: "
        f"{_most(importers)}."
    )


def _most(counts: Counter[str]) -> str:
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:5]
    return ", ".join(f"`{name}` {count}" for name, count in ranked)


def build_tables(house: House) -> str:
    """Returns the section of the page between its markers."""
    return "\n".join([*build_sizes(house), "", *build_rooms(house), "", *build_measures(house), "", *build_fans(house)])


def list_findings(house: House) -> Iterator[str]:
    """Yields every finding behind the counts, one a line."""
    for component in house.find_circles(lazy=True):
        yield f"cycle: {' '.join(component)}"
    for name, importer in find_single_importers(house).items():
        yield f"one importer: {name} <- {importer}"
    for name, modules in find_shared_names(house).items():
        yield f"two meanings: {name}: {' '.join(modules)}"
    for module in house.modules.values():
        for line in find_broad_excepts(module):
            yield f"broad except: {module.path.relative_to(house.root)}:{line}"


def main(arguments: Sequence[str]) -> int:
    """Writes the page, and with `--list` prints the findings."""
    if unknown := set(arguments) - {"--list"}:
        sys.exit(f"unknown: {' '.join(sorted(unknown))}\n{__doc__}")
    house = read_house()
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{build_tables(house)}\n{END}{after}")
    if "--list" in arguments:
        print("\n".join(list_findings(house)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
