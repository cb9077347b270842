from __future__ import annotations

import pytest
import torch

from hf_engine.rollout.memory import choose_cache_bytes, choose_positions, host_bytes, take_again
from hf_protocols.errors import BackendError


def test_bytes_are_taken_and_shares_are_of_the_memory(monkeypatch, machine_of):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    machine_of(16 << 30)
    assert choose_cache_bytes(12, None) == 12
    assert choose_cache_bytes(None, None) == 256 << 20
    assert choose_cache_bytes(None, 0.25) == 4 << 30


def test_host_bytes_are_those_of_the_container(machine_of):
    machine_of(12 << 20)
    assert host_bytes() == 12 << 20
    assert choose_cache_bytes(None, 0.5) == 6 << 20


@pytest.mark.parametrize(
    ("cache_bytes", "fraction", "message"),
    [
        (1 << 20, 0.5, "cache_bytes=1048576 and cache_fraction=0.5 both size the cache. Use one"),
        (0, None, "cache_bytes=0 must be a whole number of at least 1"),
        ("1G", None, "cache_bytes='1G' must be a whole number of at least 1"),
        (1.5e6, None, "cache_bytes=1500000.0 must be a whole number"),
        (1 << 60, None, r"cache_bytes=1152921504606846976 is not below the memory of \d+ bytes. Lower cache_bytes"),
        (None, "a third", "cache_fraction='a third'. Use a share"),
        (None, 0.0, "cache_fraction=0.0. Use a share"),
        (None, 1.0, "cache_fraction=1.0. Use a share"),
        (None, -0.1, "above 0 and below 1"),
        (None, float("nan"), "above 0 and below 1"),
    ],
)
def test_sizes_that_are_none_are_refused(cache_bytes, fraction, message):
    with pytest.raises(BackendError, match=message):
        choose_cache_bytes(cache_bytes, fraction)


def test_sequences_are_at_most_as_long_as_the_models():
    assert (choose_positions(None, 48), choose_positions(20, 48), choose_positions(48, 48)) == (48, 20, 48)
    with pytest.raises(BackendError, match=r"max_positions=49 is above the model's 48 positions. Lower max_positions"):
        choose_positions(49, 48)


def test_caches_are_taken_again_with_zeros_all_or_none():
    caches = [torch.full((size,), 7, dtype=torch.uint8).untyped_storage() for size in (64, 32)]
    for storage in caches:
        storage.resize_(0)
    with pytest.raises(
        BackendError, match=r"4611686018427387968 bytes cannot be taken again .*. Lower cache_bytes"
    ) as error:
        take_again(caches, [64, 1 << 62])
    assert "\n" not in str(error.value)
    assert [storage.nbytes() for storage in caches] == [0, 0]
    take_again(caches, [64, 32])
    assert [storage.nbytes() for storage in caches] == [64, 32]
    assert not any(any(storage.tolist()) for storage in caches)
