"""Weights that a rank hands to an engine that keeps them itself, and the state of such an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

import torch
import torch.distributed as dist

from hf_engine.agreement import check_version
from hf_engine.resharding.layouts import WeightLayout
from hf_engine.resharding.tensor_checks import check_weights
from hf_protocols.errors import BackendError, ReshardError
from hf_protocols.validation import show

__all__ = ["WeightState"]


class WeightState:
    """State of an engine that keeps its weights itself: an update of them, their version, and its cache's memory.

    Args:
        layout: of the weights.
    """

    def __init__(self, layout: WeightLayout) -> None:
        self.version = 0
        """The version last committed; 0 for the weights that the engine was built with."""
        self.is_released = False
        """True while the memory of keys and values is given back."""
        self._layout = layout
        self._loaded: set[str] | None = None

    @property
    def is_updating(self) -> bool:
        """True from `begin` to `commit`, through an update that failed as well."""
        return self._loaded is not None

    def begin(self, held: Iterable[str] = ()) -> None:
        """Starts an update in which every parameter but those that are held must come."""
        self._loaded = set(held)

    def require_update(self, method: str) -> set[str]:
        """Returns the parameters that have come in the update.

        Raises:
            BackendError: without one, naming the method that belongs into it.
        """
        if self._loaded is None:
            raise BackendError(f"{method} without an update. Call begin_weights first")
        return self._loaded

    def check_shards(self, shards: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Refuses what is not this rank's boxes of parameters that did not come before; see `SupportsShardLoading`.

        Raises:
            BackendError: without an update.
            ReshardError: naming what is wrong.
        """
        _check_shards(self._layout, dist.get_rank(), shards, self.require_update("load_shards"))

    def add(self, names: Iterable[str]) -> None:
        """Counts parameters as loaded."""
        self.require_update("load_shards").update(names)

    def check_commit(self, version: int) -> None:
        """Refuses to commit a wrong version, or an update before all of this rank's parameters came.

        Raises:
            BackendError: for what is not a version.
            ReshardError: naming the parameters that did not come.
        """
        check_version(version, BackendError)
        if self._loaded is None:
            return
        if missing := sorted(self._layout.boxes_of(dist.get_rank()).keys() - self._loaded):
            raise ReshardError(f"the parameters {missing} did not arrive. Load them before commit_weights")

    def commit(self, version: int) -> None:
        """Ends an update, if there is one."""
        self._loaded = None
        self.version = version

    def check_ready(self) -> None:
        """Refuses to generate within an update, or without the cache's memory.

        Raises:
            BackendError: naming which.
        """
        if self.is_updating:
            raise BackendError("an update of the weights was begun and not committed. Send them again and commit")
        if self.is_released:
            raise BackendError("the KV cache was released. Call resume() before generate()")


def _check_shards(
    layout: WeightLayout, rank: int, shards: Mapping[str, Sequence[torch.Tensor]], loaded: Set[str]
) -> None:
    if not isinstance(shards, Mapping):
        raise ReshardError(f"shards={show(shards)}. Use a mapping from names to lists of one tensor per box")
    if loose := [name for name, parts in shards.items() if not isinstance(parts, list | tuple)]:
        raise ReshardError(f"the shards of {loose} are not lists. Use a list of one tensor per box")
    tensors = [(name, part) for name, parts in shards.items() for part in parts]
    if empty := sorted({name for name, part in tensors if getattr(part, "is_meta", False)}):
        raise ReshardError(
            f"the shards of {empty} are on the device 'meta', without contents. Use tensors on a real device"
        )
    if again := sorted(loaded & shards.keys()):
        raise ReshardError(f"the parameters {again} came twice in one update")
    held = layout.boxes_of(rank)
    wanted = {name: held[name] for name in shards if name in held}
    check_weights(replace(layout, boxes={rank: wanted}), rank, shards, "received")
