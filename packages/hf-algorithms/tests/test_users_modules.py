"""Functions of users' modules in a program with several threads, which share Python's path and its modules."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_algorithms.rewards import load_function
from hf_algorithms.rewards._load import _IMPORTING, imports_from
from hf_protocols.errors import ConfigError


def write_rewards(folder: Path, paid: str) -> None:
    folder.mkdir(exist_ok=True)
    body = f"import time\ntime.sleep(0.1)\ndef score(responses):\n    return ['{paid}'] * len(responses)\n"
    (folder / "slow_rewards.py").write_text(body)


@pytest.fixture(autouse=True)
def clean_modules() -> Iterator[None]:
    names = set(sys.modules)
    yield
    for name in set(sys.modules) - names:
        del sys.modules[name]


def test_threads_load_modules_of_one_name_from_their_own_folders(tmp_path):
    found = {}

    def load(name: str) -> None:
        found[name] = load_function("slow_rewards:score", search_path=[tmp_path / name])(["r"])

    for name in "abc":
        write_rewards(tmp_path / name, name)
    threads = [threading.Thread(target=load, args=name) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {name: [name] for name in "abc"}


def test_an_import_of_another_thread_has_a_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_algorithms.rewards._load._LONGEST_WAIT_S", 0.05)
    write_rewards(tmp_path, "a")
    refusals = []

    def load_refused() -> None:
        with pytest.raises(ConfigError, match=r"^another thread .* for 0.05 s. Wait for its end"):
            load_function("slow_rewards:score", search_path=[tmp_path])
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
