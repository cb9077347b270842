"""Small runs of the `hybridflow` command, shared by the tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers

from hf_algorithms import cli
from hf_algorithms.data import load_rows, write_addition_data, write_rows
from shared_cluster import shared_cluster
from small_runs import SMALL_RUN, Outcome

NUM_TRAIN = 512
"""Rows of `addition_data` to train on: two of the largest batches of a test."""


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """As on a rank: runs inside this process neither wait for busy cores nor depend on how many there are."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cluster_address() -> Iterator[str]:
    """Address of the Ray cluster that small runs share."""
    with shared_cluster() as address:
        yield address


@pytest.fixture(scope="session")
def addition_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few hundred problems to train on: a run reads all of them four times before its first iteration."""
    directory = tmp_path_factory.mktemp("addition")
    files = write_addition_data(directory, seed=0)
    write_rows(files.train, load_rows(files.train)[:NUM_TRAIN])
    return directory


@pytest.fixture
def small_config(tmp_path: Path, addition_data: Path) -> Path:
    """A configuration of a run of seconds; its output goes to `run` next to it."""
    path = tmp_path / "config.toml"
    path.write_text(SMALL_RUN.format(output=tmp_path / "run", data=addition_data))
    return path


@pytest.fixture
def hybridflow(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run the command in this process, as a shell would."""
    # The command says so before it imports transformers, which another test may have imported.
    transformers.utils.logging.disable_progress_bar()

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["hybridflow", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        output, errors = capfd.readouterr()
        code = ended.value.code
        return Outcome(code if isinstance(code, int) else int(code is not None), output, errors)

    return run
