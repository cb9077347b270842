"""Bytes of device memory in host memory, in pieces that torch's allocator does not enlarge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

__all__ = ["HostCopies"]

_CHUNK_BYTES = 256 << 20
"""torch rounds pinned memory up to a power of two: chunks of that size waste nothing, except the last."""


class HostCopies:
    """Copies of storages on the host, one after the other in chunks of page-locked memory.

    Args:
        storages: that have bytes, on one device.
        chunk_bytes: a power of two.
    """

    def __init__(self, storages: Sequence[torch.UntypedStorage], chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._sizes = [storage.nbytes() for storage in storages]
        total = sum(self._sizes)
        pinned = any(storage.is_cuda for storage in storages)
        self._chunks = [
            torch.empty(min(chunk_bytes, total - start), dtype=torch.uint8, pin_memory=pinned)
            for start in range(0, total, chunk_bytes)
        ]
        for storage, pieces in zip(storages, self._list_pieces(), strict=True):
            for piece, part in zip(pieces, _split(storage, pieces), strict=True):
                piece.copy_(part)

    def put_back(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Fills the same storages, which may have been emptied, with what they held."""
        for storage, nbytes, pieces in zip(storages, self._sizes, self._list_pieces(), strict=True):
            storage.resize_(nbytes)
            for piece, part in zip(pieces, _split(storage, pieces), strict=True):
                part.copy_(piece)

    def _list_pieces(self) -> Iterator[list[torch.Tensor]]:
        """For each storage the parts of the chunks that hold it, in order."""
        chunks = iter(self._chunks)
        left = next(chunks, torch.empty(0, dtype=torch.uint8))
        for nbytes in self._sizes:
            pieces = []
            while nbytes:
                if not len(left):
                    left = next(chunks)
                pieces.append(left[:nbytes])
                nbytes -= len(pieces[-1])
                left = left[len(pieces[-1]) :]
            yield pieces


def _split(storage: torch.UntypedStorage, pieces: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The bytes of a storage, in parts of the pieces' sizes."""
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return torch.split(whole, [len(piece) for piece in pieces])
