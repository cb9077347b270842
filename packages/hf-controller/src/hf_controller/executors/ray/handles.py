"""References of results as they travel in calls, and shards that came with their arrays."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ray import cloudpickle

__all__ = ["Fetched", "LocalBatchHandle", "Sealed", "SplitBatchHandle", "ValueHandle", "attach"]


class Sealed:
    """A reference that stays packed until it is opened.

    A reader gets a reference to every shard of a batch and reads a few of them. Unpacking a reference costs messages
    to its owner; Ray counts the reference as long as the object or the call that contains the packed one exists.

    Args:
        reference: the reference.
    """

    def __init__(self, reference: Any) -> None:
        self._reference = reference
        self._packed = b""

    def __reduce__(self) -> tuple[Callable[[bytes], Sealed], tuple[bytes]]:
        # Packed again inside the object that will contain it, so that Ray sees it there.
        return _reseal, (cloudpickle.dumps(self.open()),)  # type: ignore[no-untyped-call]

    def open(self) -> Any:
        """The reference."""
        if self._reference is None:
            self._reference = pickle.loads(self._packed)
        return self._reference


def _reseal(packed: bytes) -> Sealed:
    sealed = Sealed(None)
    sealed._packed = packed
    return sealed


@dataclass(frozen=True)
class LocalBatchHandle:
    """Handle of one rank's part of a batch whose readers are all on this machine.

    Attributes:
        contents: reference of the shard with its arrays, see `CallServer.run_apart`, or the failure.
    """

    contents: Any


@dataclass(frozen=True, kw_only=True)
class SplitBatchHandle:
    """Handle of one rank's part of a batch, for readers on any machine of a cluster.

    Attributes:
        metadata: reference of the answer with the shard's metadata, or the failure; a far reader fetches it whole.
        contents: reference of the shard with its arrays, see `CallServer.run_apart`, or the failure.
    """

    metadata: Any
    contents: Any


@dataclass(frozen=True)
class ValueHandle:
    """Reference of the object that a method returned, or of the failure."""

    contents: Any


@dataclass(frozen=True)
class Fetched:
    """Arrays that came with their metadata."""

    arrays: Any


def attach(contents: Any) -> Any:
    """Returns the shard with the arrays that came with it, or behind its own reference; a failure as it is."""
    if not isinstance(contents, tuple):
        return contents
    shard, arrays = contents
    return shard if arrays is None else replace(shard, arrays=Fetched(arrays))
