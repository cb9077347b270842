from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_engine.resharding.digest import compute_digest


def tensor(numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("numel", [0, 1, 3, 2047, 2048, 2049, 5000])
def test_equal_bits_have_equal_digests_with_any_strides(numel):
    values = tensor(numel * 2)
    assert compute_digest(values[::2]) == compute_digest(values[::2].contiguous())
    assert compute_digest(values[::2]) == compute_digest(values[::2].contiguous().view(torch.int32))


def test_a_digest_is_what_it_was():
    """Ranks with two versions of this library take each other's weights."""
    assert compute_digest(torch.arange(5000, dtype=torch.int32)) == 12031491396651945532


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("start", [1, 2, 3])
def test_a_view_has_the_digest_of_its_copy_wherever_it_begins(start, dtype):
    values = tensor(9000).to(dtype)[start:]
    assert compute_digest(values) == compute_digest(values.clone())


@settings(max_examples=60)
@given(st.integers(1, 9000), st.data())
def test_one_flipped_bit_a_swap_and_a_shift_are_seen(numel, data):
    values = tensor(numel)
    digest = compute_digest(values)
    at, bit = data.draw(st.integers(0, numel - 1)), data.draw(st.integers(0, 31))
    flipped = values.clone()
    flipped.view(torch.int32)[at] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert compute_digest(flipped) != digest
    other = data.draw(st.integers(0, numel - 1))
    swapped = values.clone()
    swapped[[at, other]] = values[[other, at]]
    assert (compute_digest(swapped) == digest) == torch.equal(swapped, values)
    if numel > 1:
        assert compute_digest(values.roll(1)) != digest


def test_a_transposed_matrix_and_swapped_blocks_are_seen():
    matrix = tensor(64 * 64).view(64, 64)
    assert compute_digest(matrix) != compute_digest(matrix.T)
    large = tensor(8192)
    assert compute_digest(large) != compute_digest(torch.cat([large[4096:], large[:4096]]))


def test_length_counts():
    assert compute_digest(torch.zeros(8)) != compute_digest(torch.zeros(9))
