"""A fast 64-bit digest of a tensor's bits: it travels with weights whose transfer is verified.

Not cryptographic: it finds damaged, lost, swapped or shifted pieces, not an adversary.
"""

from __future__ import annotations

import torch

__all__ = ["compute_digest", "digest_words"]

_ROW = 1024
"""Words in a row of the digest's table."""
_BLOCK_ROWS = 64
"""Rows that are summed together on a CPU: 512 KiB."""
_MASK = (1 << 64) - 1
_weights: dict[torch.device, torch.Tensor] = {}


def compute_digest(tensor: torch.Tensor) -> int:
    """Digest of a tensor's bits in row-major order; two tensors of equal bits have equal digests.

    Args:
        tensor: any dtype and device; one that is not contiguous is copied, as is a view that begins inside a word.
    """
    flat = _as_bytes(tensor)
    return (int(digest_words(flat)) * 31 + flat.numel()) & _MASK


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1 or flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def digest_words(data: torch.Tensor) -> torch.Tensor:
    """Digest of a flat uint8 tensor as an int64 scalar on its device; nothing waits for the device.

    Two weighted sums of the 64-bit words, by row and by column of a table of 1,024 columns: as fast as memory.
    """
    whole = data.numel() // (8 * _ROW) * (8 * _ROW)
    digest = torch.zeros((), dtype=torch.int64, device=data.device)
    if whole:
        table = data[:whole].view(torch.int64).view(-1, _ROW)
        rows, columns = _sums(table)
        # Odd plus even is odd: no change of a single word is multiplied away.
        digest = digest + (rows * _odd(rows)).sum() + (columns * _odd(columns)).sum() * 6
    rest = data[whole:]
    padded = torch.zeros(8 * _ROW, dtype=torch.uint8, device=data.device)
    padded[: rest.numel()] = rest
    words = padded.view(torch.int64)
    return digest * 13 + (words * _odd(words)).sum()


def _sums(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of the rows and of the columns."""
    if not table.is_cpu:
        return table.sum(1), table.sum(0)
    # A block's second sum finds it in the processor's cache.
    blocks = torch.split(table, _BLOCK_ROWS)
    rows, columns = zip(*((block.sum(1), block.sum(0)) for block in blocks), strict=True)
    return torch.cat(rows), torch.stack(columns).sum(0)


def _odd(values: torch.Tensor) -> torch.Tensor:
    """Fixed odd multipliers without a pattern, one per position."""
    known = _weights.get(values.device)
    if known is None or known.numel() < values.numel():
        index = torch.arange(max(values.numel(), _ROW), dtype=torch.int64, device=values.device)
        mixed = (index + 1) * -7046029254386353131
        mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
        known = _weights[values.device] = (mixed ^ (mixed >> 32)) | 1
    return known[: values.numel()]
