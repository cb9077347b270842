"""Seeds of requests on a CPU without SGLang's kernels: what its deterministic mode asks of them, by torch.

A server with `--enable-deterministic-inference` draws each sample from its own seed. The hash that it draws with is a
kernel, and so are the products that do not depend on the batch; float32 on a CPU does without such products.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["hash_positions", "register_seeds"]

_MASK = 0xFFFFFFFF


def register_seeds(registry: Any, replace: Any) -> None:
    """Puts ours in place of the kernels: in SGLang's registry of hooks, with the kind that replaces."""
    from sglang.srt.arg_groups import choices

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    registry.register("sglang.srt.layers.sampler.murmur_hash32", hash_positions, replace)
    registry.register("sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", lambda: None, replace)


def hash_positions(seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (32 bit) of every row's seed and position with every column's number.

    Args:
        seeds: [b], of 64 bits.
        positions: [b].
        columns: [V].

    Returns:
        uint32 [b, V].
    """
    seed = seeds.to(torch.int64)[:, None]
    state = torch.zeros((), dtype=torch.int64)
    for block in (seed, seed >> 32, positions.to(torch.int64)[:, None], columns.to(torch.int64)[None]):
        mixed = _rotate(_multiply(block & _MASK, 0xCC9E2D51), 15)
        state = state ^ _multiply(mixed, 0x1B873593)
        state = (_rotate(state, 13) * 5 + 0xE6546B64) & _MASK
    state = state ^ 16  # bytes hashed
    state = _multiply(state ^ (state >> 16), 0x85EBCA6B)
    state = _multiply(state ^ (state >> 13), 0xC2B2AE35)
    return (state ^ (state >> 16)).to(torch.uint32)


def _multiply(values: torch.Tensor, factor: int) -> torch.Tensor:
    """Of 32-bit numbers, modulo 2^32; in halves, so that nothing leaves 64 bits."""
    low, high = values & 0xFFFF, values >> 16
    return (low * factor + ((high * factor & 0xFFFF) << 16)) & _MASK


def _rotate(values: torch.Tensor, bits: int) -> torch.Tensor:
    return ((values << bits) | (values >> (32 - bits))) & _MASK
