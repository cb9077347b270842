"""Device memory given up and taken again, behind the backs of whoever holds views of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["OffloadedMemory"]


class OffloadedMemory:
    """Storages that were emptied, with what is needed to fill them again.

    Views stay the same objects: their storage has no bytes until `restore`, and must not be read before.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        self._zeros: list[tuple[torch.Tensor, int]] = []

    def __bool__(self) -> bool:
        return bool(self._copies or self._zeros)

    def move(self, tensors: Iterable[torch.Tensor]) -> int:
        """Copies the tensors' whole storages to the host and frees them; returns the bytes freed."""
        freed = 0
        for storage in _distinct_storages(tensors):
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.is_cuda).untyped_storage()
            copy.copy_(storage)
            self._copies.append((storage, copy))
            freed += _empty(storage)
        return freed

    def drop(self, tensors: Iterable[torch.Tensor]) -> int:
        """Frees the storages of tensors that fill them, and come back as zeros; returns the bytes freed."""
        freed = 0
        for tensor in tensors:
            if nbytes := _empty(tensor.untyped_storage()):
                self._zeros.append((tensor, nbytes))
                freed += nbytes
        return freed

    def restore(self) -> None:
        """Takes the memory again, with what it held."""
        for storage, copy in self._copies:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        for tensor, nbytes in self._zeros:
            tensor.untyped_storage().resize_(nbytes)
            tensor.zero_()
        self._copies, self._zeros = [], []


def _distinct_storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Storages that hold bytes, once each."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return [storage for storage in found.values() if storage.nbytes()]


def _empty(storage: torch.UntypedStorage) -> int:
    freed = storage.nbytes()
    storage.resize_(0)
    return freed
