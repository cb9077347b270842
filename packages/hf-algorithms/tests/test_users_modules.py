"""Users' modules in the tables of a process: two projects may have the same names, and files may be edited."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_algorithms.rewards import load_function
from hf_algorithms.rewards._load import _IMPORTING, get_users_function, imports_from
from hf_protocols.errors import ConfigError

pytestmark = pytest.mark.usefixtures("clean_modules")


def write_project(folder: Path, paid: str, *, source: str = "import paying") -> Path:
    """A module that pays what its neighbour says; both have the same names in every folder."""
    folder.mkdir(exist_ok=True)
    body = "def score(responses):\n    return [paying.PAID] * len(responses)\n"
    (folder / "project_rewards.py").write_text(f"{source}\n{body}")
    (folder / "paying.py").write_text(f"PAID = '{paid}'\n")
    return folder


@pytest.fixture
def clean_modules() -> Iterator[None]:
    names = set(sys.modules)
    yield
    for name in set(sys.modules) - names:
        del sys.modules[name]


def load(folder: Path, name: str = "project_rewards:score") -> Callable[..., Any]:
    return load_function(name, search_path=[folder])


NEIGHBOURS = {
    "at the top": "import paying",
    "as a package": "from packed import paying",
    "slowly": "import time, paying\ntime.sleep(0.1)",
}


@pytest.mark.parametrize("source", NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_neighbours_are_those_of_the_functions_own_folder(tmp_path, source):
    for name in "ab":
        folder = write_project(tmp_path / name, name, source=source)
        (folder / "packed").mkdir()
        (folder / "packed" / "__init__.py").touch()
        (folder / "packed" / "paying.py").write_text(f"PAID = '{name}'\n")
    first, second, again = (load(tmp_path / name) for name in "aba")
    assert [each(["r"]) for each in (first, second, again)] == [["a"], ["b"], ["a"]]
    assert sys.modules["project_rewards"].score is get_users_function(again) is get_users_function(first)
    write_project(tmp_path / "a", "a", source=f"{source}\npaying.PAID += '!'")
    edited = load(tmp_path / "a")
    assert [each(["r"]) for each in (second, edited, load(tmp_path / "b"), load(tmp_path / "a"))] == [
        ["b"],
        ["a!"],
        ["b"],
        ["a!"],
    ]


def test_neighbours_that_calls_import_are_kept_apart_too(tmp_path):
    body = "def score(responses):\n    import paying\n    return [paying.PAID] * len(responses)\n"
    for name in "ab":
        (write_project(tmp_path / name, name) / "project_rewards.py").write_text(body)
    first, second = load(tmp_path / "a"), load(tmp_path / "b")
    assert [each(["r"]) for each in (first, second, first, second)] == [["a"], ["b"], ["a"], ["b"]]


def test_a_package_is_forgotten_with_all_that_is_inside(tmp_path):
    for name in "ab":
        package = tmp_path / name / "packed"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "more.py").write_text(f"PAID = '{name}'\n")
        (package / "rewards.py").write_text("def score(responses):\n    from . import more\n    return [more.PAID]\n")
    function = load(tmp_path / "a", "packed.rewards:score")
    with imports_from([str(tmp_path / "a")]):
        importlib.import_module("packed.more")  # by the program
    assert function(["r"]) == ["a"]
    assert load(tmp_path / "b", "packed.rewards:score")(["r"]) == ["b"]
    (tmp_path / "b" / "packed" / "rewards.py").write_text("def score(responses):\n    return ['edited']\n")
    assert load(tmp_path / "b", "packed.rewards:score")(["r"]) == ["edited"]


def test_links_lie_where_they_are_found(tmp_path):
    write_project(tmp_path / "shared", "shared")
    for name in "ab":
        write_project(tmp_path / name, name)
        for file in ("project_rewards.py",) if name == "a" else ("project_rewards.py", "paying.py"):
            (tmp_path / name / file).unlink()
            (tmp_path / name / file).symlink_to(tmp_path / "shared" / file)
    first = load(tmp_path / "a")
    assert get_users_function(load(tmp_path / "a")) is get_users_function(first)
    assert [first(["r"]), load(tmp_path / "b")(["r"]), load(tmp_path / "a")(["r"])] == [["a"], ["shared"], ["a"]]


def test_modules_that_no_function_loaded_are_never_forgotten(tmp_path, monkeypatch):
    """Modules of the program, installed ones, and those whose names another project has for a folder of data."""
    program = write_project(tmp_path / "program", "program")
    monkeypatch.syspath_prepend(program)
    own = importlib.import_module("paying")
    sys.modules.pop("this_is_installed", None)
    installed = tmp_path / "site"
    installed.mkdir()
    (installed / "this_is_installed.py").write_text("")
    monkeypatch.syspath_prepend(installed)
    load(program)
    (program / "project_rewards.py").write_text("import paying, this_is_installed\nscore = len\n")
    load(program)
    kept = sys.modules["this_is_installed"]
    other = write_project(tmp_path / "other", "other", source="import types\npaying = types.SimpleNamespace(PAID=1)")
    (other / "this_is_installed.py").write_text("raise AssertionError('it is not the installed one')")
    (other / "paying.py").unlink()
    (other / "paying").mkdir()
    assert load(other)(["r"]) == [1]
    assert sys.modules["paying"] is own and sys.modules["this_is_installed"] is kept


def test_threads_load_modules_of_one_name_from_their_own_folders(tmp_path):
    found = {}

    def load_own(name: str) -> None:
        found[name] = load(tmp_path / name)(["r"])

    for name in "abc":
        write_project(tmp_path / name, name, source=NEIGHBOURS["slowly"])
    threads = [threading.Thread(target=load_own, args=name) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {name: [name] for name in "abc"}


def test_an_import_of_another_thread_has_a_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_algorithms.rewards._load._LONGEST_WAIT_S", 0.05)
    write_project(tmp_path, "a")
    refusals = []

    def load_refused() -> None:
        with pytest.raises(ConfigError, match=r"^another thread .* for 0.05 s, and .* Wait for its end"):
            load(tmp_path)
        refusals.append("refused")

    with _IMPORTING.held():
        thread = threading.Thread(target=load_refused)
        thread.start()
        thread.join(20)
    assert refusals == ["refused"]


def test_a_folder_stays_on_the_path_until_its_last_block_ends(tmp_path):
    first, second = imports_from([str(tmp_path), str(tmp_path)]), imports_from([str(tmp_path)])
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.path.count(str(tmp_path)) == 1
    second.__exit__(None, None, None)
    assert str(tmp_path) not in sys.path
    with imports_from([str(tmp_path)]):
        sys.path.remove(str(tmp_path))  # as a user's module may do
    assert str(tmp_path) not in sys.path
