from __future__ import annotations

import struct

import torch

from hf_engine.cpu_support.sglang_plugins import hash_positions


def test_the_hash_of_seeds_and_positions_is_murmurs():
    """Against the algorithm as published, on the bytes of one seed, position and column after the other."""
    seeds = torch.tensor([0, 1, 2**31 - 1, 2**63 - 1, 123456789012345])
    positions, columns = torch.tensor([0, 7, 40_000, 2**31 - 1, 1]), torch.tensor([0, 1, 151_935])
    found = hash_positions(seeds, positions, columns)
    assert found.shape == (5, 3) and found.dtype == torch.uint32
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        for column, number in enumerate(columns.tolist()):
            data = struct.pack("<QII", seed, position, number)
            assert int(found[row, column]) == murmur3(data), (seed, position, number)
    assert murmur3(b"test") == 0xBA6BD213


def murmur3(data):
    state = 0
    for (block,) in struct.iter_unpack("<I", data):
        block = block * 0xCC9E2D51 % 2**32
        block = (block << 15 | block >> 17) % 2**32
        state ^= block * 0x1B873593 % 2**32
        state = (state << 13 | state >> 19) % 2**32
        state = (state * 5 + 0xE6546B64) % 2**32
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B % 2**32
    state = (state ^ state >> 13) * 0xC2B2AE35 % 2**32
    return state ^ state >> 16
