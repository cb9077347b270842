from __future__ import annotations

import importlib
import os
import sys
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from hf_engine.testing import LocalRanks

COUNTER = """
import torch

CALLS = []


def count():
    CALLS.append(1)
    return __name__, len(CALLS)


@torch.no_grad()  # whose wrapper is in a file of torch's
def count_decorated():
    return count()
"""


def add_ranks(number):
    total = torch.tensor([float(dist.get_rank() + number)])
    dist.all_reduce(total)
    return float(total), torch.get_num_threads()


def fail_on_rank_one():
    if dist.get_rank() == 1:
        raise ValueError("this rank is broken")


def expect_in_vain():
    with pytest.raises(ValueError):
        pass


def die():
    os._exit(3)


def come_late():
    time.sleep(1.0)


def count_in(name):
    return importlib.import_module(name).count()


@contextmanager
def module_in(folder, monkeypatch, *, importable):
    """The module `rank_counter` of this folder, which ranks can import or know by its file only."""
    (folder / "rank_counter.py").write_text(COUNTER)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(folder)
        module = importlib.import_module("rank_counter")
    if importable:
        monkeypatch.syspath_prepend(folder)
    try:
        yield module
    finally:
        del sys.modules["rank_counter"]


def test_an_importable_module_has_one_state_on_a_rank(tmp_path, monkeypatch):
    with module_in(tmp_path, monkeypatch, importable=True) as module, LocalRanks(1) as ranks:
        assert ranks.run(module.count) == [("rank_counter", 1)]
        assert ranks.run(count_in, "rank_counter") == [("rank_counter", 2)]
        assert ranks.run(module.count_decorated) == [("rank_counter", 3)]
        assert module.CALLS == []


def test_a_module_that_ranks_cannot_import_is_loaded_once(tmp_path, monkeypatch):
    with module_in(tmp_path, monkeypatch, importable=False) as module, LocalRanks(1) as ranks:
        ((name, first),) = ranks.run(module.count)
        assert name.startswith("_on_rank_") and first == 1
        assert ranks.run(module.count_decorated) == [(name, 2)]


def test_another_module_of_the_same_name_is_not_taken(tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    (other / "rank_counter.py").write_text("def count():\n    return 'the other one', 0\n")
    with module_in(tmp_path, monkeypatch, importable=False) as module:
        monkeypatch.syspath_prepend(other)
        with LocalRanks(1) as ranks:
            ((name, calls),) = ranks.run(module.count)
    assert name.startswith("_on_rank_") and calls == 1


def test_failures_carry_their_traceback_and_the_ranks_come_back(capfd):
    with LocalRanks(2, timeout_s=20) as ranks:
        assert ranks.run(add_ranks, 2) == [(5.0, 1)] * 2
        with pytest.raises(RuntimeError, match=r"rank 1:\nTraceback(.|\n)*fail_on_rank_one(.|\n)*this rank is broken"):
            ranks.run(fail_on_rank_one)
        with pytest.raises(RuntimeError, match=r"expect_in_vain(.|\n)*DID NOT RAISE"):
            ranks.run(expect_in_vain)
        with pytest.raises(RuntimeError, match=r"the process of rank 0 died \(exit code 3\)"):
            ranks.run(die)
        assert ranks.run(add_ranks, 0) == [(1.0, 1)] * 2
        with pytest.raises(RuntimeError, match="rank 0 did not answer in time"):
            ranks.run(come_late, deadline_s=0.1)
        assert "BrokenPipe" not in capfd.readouterr().err, "a late answer has no reader"
