"""Device memory that is released and taken again, while other code holds views of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from hf_engine.resharding.moving import hold_training_weights
from hf_engine.training.host_copies import HostCopies
from hf_protocols.errors import BackendError

__all__ = ["OffloadedMemory"]


class OffloadedMemory:
    """Device memory that a training backend released, and refuses to use before `restore`.

    Views stay the same objects: their storage has no bytes until `restore`, and must not be read before. Memory of a
    CPU is the host's already: it stays where it is and counts as 0 bytes freed. Its use is refused all the same, so
    that a program that forgets `restore` fails on every device.

    Weights that other code emptied are refused too, for example after a transition that moves them into an engine.

    Args:
        weights: the live weights on this rank: what scoring needs.
    """

    def __init__(self, weights: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._weights = weights
        self._copies: list[tuple[list[torch.UntypedStorage], HostCopies]] = []
        self._zeros: list[tuple[torch.Tensor, int]] = []
        self._lacks_states = False
        self._lacks_weights = False

    def give_up(
        self,
        *,
        states: Sequence[torch.Tensor] = (),
        zeros: Sequence[torch.Tensor] = (),
        weights: bool = False,
    ) -> int:
        """Moves whole storages to the host; returns the bytes freed on the device.

        Args:
            states: what only training needs.
            zeros: each fills its storage; they are not kept, and come back as zeros.
            weights: the weights too.

        Raises:
            BackendError: for weights that are inside a generation engine's.
        """
        if weights and not self._lacks_weights:
            self.require_weights("offload(weights=True)")
        self._lacks_states |= bool(states)
        self._lacks_weights |= weights
        freed = self._drop(zeros) + self._move([*states, *(self._weights() if weights else ())])
        if freed and torch.cuda.is_available():
            torch.cuda.empty_cache()
        return freed

    def restore(self) -> None:
        """Takes the memory again, with what it held."""
        for storages, copies in self._copies:
            copies.put_back(storages)
        for tensor, nbytes in self._zeros:
            tensor.untyped_storage().resize_(nbytes)
            tensor.zero_()
        self._copies, self._zeros = [], []
        self._lacks_states = self._lacks_weights = False

    def require_weights(self, method: str) -> None:
        """Refuses a method that needs the weights while they are offloaded, or inside a generation engine's.

        Raises:
            BackendError: naming the method, and `reload` or `generation`.
        """
        if self._lacks_weights:
            raise BackendError(f"{method} needs the weights, which are offloaded. Call reload() first")
        weights = [tensor for tensor in self._weights() if tensor.numel()]
        # Reading a storage without bytes kills the process, without an error.
        if any(not tensor.untyped_storage().nbytes() for tensor in weights) or hold_training_weights(weights):
            raise BackendError(
                f"{method} needs the weights, which are inside those of a generation engine. Leave generation() "
                'first, or build the HybridEngine with training_weights="keep"'
            )

    def require_all(self, method: str) -> None:
        """Refuses a method that needs everything while anything is offloaded.

        Raises:
            BackendError: naming the method and `reload`.
        """
        self.require_weights(method)
        if self._lacks_states:
            raise BackendError(f"{method} needs the optimizer's state, which is offloaded. Call reload() first")

    def _move(self, tensors: Iterable[torch.Tensor]) -> int:
        every = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}.values()
        storages = [storage for storage in every if storage.nbytes() and not _is_on_host(storage)]
        self._copies.append((storages, HostCopies(storages)))
        return sum(_empty(storage) for storage in storages)

    def _drop(self, tensors: Iterable[torch.Tensor]) -> int:
        freed = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and not _is_on_host(storage):
                self._zeros.append((tensor, storage.nbytes()))
                freed += _empty(storage)
        return freed


def _is_on_host(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == "cpu"


def _empty(storage: torch.UntypedStorage) -> int:
    freed = storage.nbytes()
    storage.resize_(0)
    return freed
