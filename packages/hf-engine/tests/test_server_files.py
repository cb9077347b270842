from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from hf_engine.rollout.server._files import WeightFiles
from hf_protocols import BackendError


def test_ranks_write_one_update_and_the_next_one_replaces_it(tmp_path):
    ranks = [WeightFiles(tmp_path, "run", rank) for rank in range(2)]
    stamps, folders = [], []
    for value in (1.0, 2.0):
        for files in ranks:
            files.begin()
        ranks[0].write({"a": torch.full((2,), value)})
        ranks[0].write({"b": torch.full((3, 2), value).T})
        ranks[1].write({"c": torch.full((1,), value, dtype=torch.bfloat16)})
        assert ranks[0].folder == ranks[1].folder and ranks[0].stamp == ranks[1].stamp
        found = {}
        for path in sorted(ranks[0].folder.iterdir()):
            found |= load_file(path)
        assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {"a": (2,), "b": (2, 3), "c": (1,)}
        assert all(bool((tensor == value).all()) for tensor in found.values())
        stamps.append(ranks[0].stamp)
        folders.append(ranks[0].folder)
    assert len(set(stamps)) == 2 and not folders[0].exists()
    for files in ranks:
        files.close()
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    files = WeightFiles(tmp_path / "file", "run", 0)
    files.begin()
    with pytest.raises(
        BackendError, match=r"could not be left in '.*file/run/000001/.*rollout.options.weights_directory"
    ):
        files.write({"a": torch.zeros(2)})


def test_two_runs_share_a_directory(tmp_path):
    first, second = WeightFiles(tmp_path, "first", 0), WeightFiles(tmp_path, "second", 0)
    for files in (first, second):
        files.begin()
        files.write({"a": torch.zeros(2)})
    assert first.stamp != second.stamp
    first.close()
    assert len(list(second.folder.iterdir())) == 1
