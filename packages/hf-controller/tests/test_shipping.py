from __future__ import annotations

import importlib
import os
import sys

import pytest

from hf_controller.executors.ray.shipping import is_importable_elsewhere, list_import_path


@pytest.fixture
def script_folder(tmp_path, monkeypatch):
    """As if a script there was run, with another folder in PYTHONPATH."""
    variable = tmp_path / "variable"
    variable.mkdir()
    (tmp_path / "script").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(variable))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "script"), str(variable), *sys.path])
    names = set(sys.modules)
    yield tmp_path / "script"
    for name in set(sys.modules) - names:
        del sys.modules[name]


def test_import_path_has_the_programs_own_folders_last(script_folder):
    path = list_import_path()
    library = os.path.dirname(os.__file__)
    assert path[-1] == str(script_folder) or path.index(str(script_folder)) > path.index(library)
    assert path.index(str(script_folder.parent / "variable")) < path.index(library)
    assert len(set(path)) == len(path)
    assert set(path) == {os.path.abspath(folder) for folder in [*sys.path, os.getcwd()]}


def test_import_path_names_the_working_directory(monkeypatch):
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    path = list_import_path()
    assert path.index(os.getcwd()) > path.index(os.path.dirname(os.__file__))


@pytest.mark.parametrize(("name", "is_found"), [("my_workers_of_this_test", True), ("tomllib", False)])
def test_module_hidden_in_workers_is_not_importable(script_folder, monkeypatch, name, is_found):
    """The program's own folder hides a module that workers import, if one of that name is installed."""
    (script_folder / f"{name}.py").write_text("VALUE = 1\n")
    monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    module = importlib.import_module(name)
    assert module.VALUE == 1
    assert is_importable_elsewhere(module) is is_found
