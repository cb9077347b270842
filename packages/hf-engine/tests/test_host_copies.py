"""Storages in host memory: bit for bit, over the borders of chunks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_engine.training.host_copies import HostCopies


@given(st.lists(st.integers(1, 200), max_size=6), st.sampled_from([1, 16, 64, 1024]))
@settings(max_examples=60, deadline=None)
def test_emptied_storages_come_back(sizes, chunk_bytes):
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    before = [tensor.clone() for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in tensors]
    copies = HostCopies(storages, chunk_bytes)
    for storage in storages:
        storage.fill_(0)
        storage.resize_(0)
    copies.put_back(storages)
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))


@pytest.mark.parametrize(("sizes", "chunks"), [([100, 30, 126], [128, 128]), ([129], [128, 1]), ([], [])])
def test_memory_is_taken_in_whole_chunks(sizes, chunks):
    copies = HostCopies([torch.empty(size, dtype=torch.uint8).untyped_storage() for size in sizes], 128)
    assert [len(chunk) for chunk in copies._chunks] == chunks
