from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from hf_engine.testing import LocalRanks
from hf_engine.testing._local_ranks import preload
from hf_protocols import read_machine_limits

torch.set_num_threads(1)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Ranks with real vLLM engines are forked from a process that has imported it: 8 s of CPU each otherwise."""
    if any(item.get_closest_marker("vllm") for item in session.items):
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read at the import
        preload("hf_engine.rollout.vllm._engine", "hf_engine.cpu_support.vllm_worker")


@pytest.fixture(scope="module")
def ranks1() -> Iterator[LocalRanks]:
    with LocalRanks(1) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def ranks2() -> Iterator[LocalRanks]:
    with LocalRanks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def ranks3() -> Iterator[LocalRanks]:
    with LocalRanks(3) as ranks:
        yield ranks


@pytest.fixture
def machine_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has the engine find itself in a container of so many bytes of memory."""

    def contain(memory_bytes: int) -> None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: {memory_bytes // 1024} kB\n")
        monkeypatch.setattr("hf_engine.rollout.memory.read_machine_limits", partial(read_machine_limits, tmp_path))

    return contain
