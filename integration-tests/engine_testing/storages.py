"""Watching storages grow and shrink, without knowing who does it or why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["watch_storages"]


@contextmanager
def watch_storages(observe: Callable[[], object]) -> Iterator[None]:
    """Calls `observe` after every `resize_` of a storage, this process's threads all."""
    real = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> None:
        real(storage, size)
        observe()

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = real  # type: ignore[method-assign]
