"""Users' modules in the tables of a process: two projects may have the same names, and files may be edited."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_algorithms.rewards import load_function
from hf_algorithms.rewards._load import _IMPORTING, imports_from
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


NEIGHBOURS = {
    "at the top": "import paying",
    "as a package": "from packed import paying",
    "slowly": "import time, paying\ntime.sleep(0.1)",
}


@pytest.mark.parametrize("source", NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_neighbours_are_those_of_the_folder_as_they_are_now(tmp_path, source):
    def load(folder: Path) -> Callable[..., Any]:
        return load_function("project_rewards:score", search_path=[folder])

    for name in "ab":
        folder = write_project(tmp_path / name, name, source=source)
        (folder / "packed").mkdir()
        (folder / "packed" / "__init__.py").touch()
        (folder / "packed" / "paying.py").write_text(f"PAID = '{name}'\n")
    first, second, again = load(tmp_path / "a"), load(tmp_path / "b"), load(tmp_path / "a")
    assert [each(["r"]) for each in (first, second, again)] == [["a"], ["b"], ["a"]]
    for file in ("paying.py", "packed/paying.py"):
        (tmp_path / "a" / file).write_text("PAID = 'edited'\n")
    assert load(tmp_path / "a")(["r"]) == ["edited"]
    assert second(["r"]) == ["b"]


def test_a_neighbour_that_a_call_imports_is_noted_too(tmp_path):
    for name in "ab":
        write_project(tmp_path / name, name, source="")
        body = "def score(responses):\n    import paying\n    return [paying.PAID] * len(responses)\n"
        (tmp_path / name / "project_rewards.py").write_text(body)
        function = load_function("project_rewards:score", search_path=[tmp_path / name])
        assert function(["r"]) == [name]


def test_modules_of_the_program_and_installed_ones_stay(tmp_path, monkeypatch):
    """Only what was loaded for a function is dropped, and nothing that lies deeper than its folders."""
    program, project = write_project(tmp_path / "program", "program"), tmp_path / "program" / "project"
    write_project(project, "project")
    monkeypatch.syspath_prepend(program)
    own = importlib.import_module("paying")
    (program / "more.py").write_text("import numpy, paying\nscore = print\n")
    load_function("more:score", search_path=[program, Path(np.__file__).parents[2]])
    (program / "more.py").write_text("import numpy, paying\nscore = len\n")
    assert load_function("more:score", search_path=[program])(["r"]) == 1
    assert sys.modules["paying"] is own and sys.modules["numpy"] is np


def test_threads_load_modules_of_one_name_from_their_own_folders(tmp_path):
    found = {}

    def load(name: str) -> None:
        found[name] = load_function("project_rewards:score", search_path=[tmp_path / name])(["r"])

    for name in "abc":
        write_project(tmp_path / name, name, source=NEIGHBOURS["slowly"])
    threads = [threading.Thread(target=load, args=name) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {name: [name] for name in "abc"}


def test_an_import_of_another_thread_is_waited_for_until_a_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_algorithms.rewards._load._LONGEST_WAIT_S", 0.05)
    write_project(tmp_path, "a")
    with _IMPORTING:
        thread_found = []

        def load() -> None:
            with pytest.raises(ConfigError, match=r"another thread's import was not over after 0.05 s. Wait"):
                load_function("project_rewards:score", search_path=[tmp_path])
            thread_found.append("refused")

        thread = threading.Thread(target=load)
        thread.start()
        thread.join(20)
    assert thread_found == ["refused"]


def test_a_folder_stays_on_the_path_until_its_last_block_ends(tmp_path):
    first, second = imports_from([str(tmp_path)]), imports_from([str(tmp_path)])
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.path.count(str(tmp_path)) == 1
    second.__exit__(None, None, None)
    assert str(tmp_path) not in sys.path
