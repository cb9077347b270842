from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import hf_protocols

SOURCE = Path(hf_protocols.__file__).parent
PUBLIC = ["hf_protocols"] + [
    f"hf_protocols.{module.name}" for module in pkgutil.iter_modules([str(SOURCE)]) if not module.name.startswith("_")
]


def defined_in(module: ModuleType) -> set[str]:
    """Public classes and functions that a module defines itself."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    }


@pytest.mark.parametrize("name", PUBLIC)
def test_all_lists_what_can_be_imported(name: str) -> None:
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    assert all(hasattr(module, member) for member in module.__all__)
    assert defined_in(module) <= set(module.__all__)


def test_the_package_offers_what_its_modules_offer() -> None:
    offered = {member for name in PUBLIC[1:] for member in importlib.import_module(name).__all__}
    only_in_modules = {"Collect", "Distribute", "FromArgument", "Method", "Returns", "Rows", "check_transfer_protocol"}
    apart = "columns drawing foreign_code outer_files paths positions process_lock similar_names toml validation"
    for name in apart.split():
        only_in_modules |= set(importlib.import_module(f"hf_protocols.{name}").__all__)
    assert set(hf_protocols.__all__) == offered - only_in_modules


@pytest.mark.parametrize("name", PUBLIC)
def test_everything_public_is_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    for member in defined_in(module):
        value = getattr(module, member)
        assert value.__doc__, member
        assert not value.__doc__.startswith(f"{member}("), f"{member} has the docstring that dataclass made"
        if inspect.isclass(value):
            undocumented = [
                method
                for method, function in vars(value).items()
                if not method.startswith("_") and callable(function) and not function.__doc__
            ]
            assert not undocumented, member


def test_every_standard_protocol_is_documented() -> None:
    body = ast.parse((SOURCE / "standard.py").read_text(encoding="utf-8")).body
    documented = {
        statement.targets[0].id
        for statement, after in itertools.pairwise(body)
        if isinstance(statement, ast.Assign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }
    assert documented == set(importlib.import_module("hf_protocols.standard").__all__)


def test_only_the_standard_library_is_imported() -> None:
    """In a fresh interpreter that sees this package's sources and nothing that was installed."""
    code = (
        f"import sys; sys.path.insert(0, {str(SOURCE.parent)!r}); before = set(sys.modules)\n"
        f"import {', '.join(PUBLIC)}\n"
        "roots = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(roots - set(sys.stdlib_module_names)))\n"
    )
    run = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.strip() == "['hf_protocols']"


def test_the_package_is_typed() -> None:
    assert (SOURCE / "py.typed").is_file()
