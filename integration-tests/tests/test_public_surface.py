"""`__all__` is the public surface: what it lists is importable and documented, and nothing else is public."""

from __future__ import annotations

import ast
import importlib
import re
import types
from pathlib import Path

import griffe
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("hf_protocols", "hf_engine", "hf_mapper", "hf_controller", "hf_algorithms")
SOURCES = {package: ROOT / "packages" / package.replace("_", "-") / "src" / package for package in PACKAGES}
MODULES = sorted(path for source in SOURCES.values() for path in source.rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_all_lists_what_is_importable(package: str) -> None:
    module = importlib.import_module(package)
    assert len(module.__all__) == len(set(module.__all__))
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert set(module.__all__) <= set(dir(module)), "a module that imports lazily also needs __dir__, for completion"
    assert {name for name in dir(module) if _is_ours(module, name)} <= set(module.__all__)


def _is_ours(module: types.ModuleType, name: str) -> bool:
    """Returns True if a visible name is part of the surface, and not something that the module imported to work."""
    value = getattr(module, name)
    home = getattr(value, "__module__", module.__name__)
    return not (
        name.startswith("_")
        or name in {"TYPE_CHECKING", "annotations"}
        or isinstance(value, types.ModuleType)
        or not str(home).startswith("hf_")
    )


@pytest.fixture(scope="module")
def documentation() -> griffe.ModulesCollection:
    loader = griffe.GriffeLoader(search_paths=[str(source.parent) for source in SOURCES.values()])
    for package in PACKAGES:
        loader.load(package)
    loader.resolve_aliases(external=True)
    return loader.modules_collection


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_documented(package: str, documentation: griffe.ModulesCollection) -> None:
    page = (ROOT / "docs" / "reference" / f"{package.replace('_', '-')}.md").read_text()
    assert f"::: {package}\n" in page
    exported = [documentation[package][name] for name in importlib.import_module(package).__all__]
    assert [item.path for item in exported if not item.has_docstring] == []
    assert [path for item in exported if item.is_class for path in _methods_without_docstring(item)] == []


def _methods_without_docstring(item: griffe.Class | griffe.Alias) -> list[str]:
    family = [item, *item.mro()]
    return [
        member.path
        for name, member in item.members.items()
        if member.is_function
        and not name.startswith("_")
        and not any(name in parent.members and parent.members[name].has_docstring for parent in family)
    ]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT / "packages")))
def test_public_names_of_a_module_are_in_its_all(path: Path) -> None:
    tree = ast.parse(path.read_text())
    public = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not _is_a_command(node)
    }
    if path.stem.startswith("_") and path.stem != "__init__":
        return
    assert public <= _listed_in_all(tree)


def _is_a_command(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Returns True for a part of a command line: its name is what users type there, not what they import."""
    return any(re.search(r"\.(command|group)\b", ast.unparse(decorator)) for decorator in node.decorator_list)


def _listed_in_all(tree: ast.Module) -> set[str]:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return set(ast.literal_eval(node.value))
    return set()
