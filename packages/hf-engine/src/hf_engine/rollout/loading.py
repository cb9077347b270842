"""Weights that a rank hands to an engine that keeps them itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import torch

from hf_engine.resharding.layouts import WeightLayout
from hf_engine.resharding.tensor_checks import check_weights
from hf_protocols.errors import BackendError, ReshardError
from hf_protocols.validation import Checks, show

__all__ = ["check_complete", "check_shards", "check_version"]

_check = Checks(BackendError)

_MOST_VERSIONS = 2**31 - 1


def check_version(version: int) -> None:
    """Refuses what is not a version of weights: a whole number that every sample carries."""
    _check.count("version", version, least=0)
    if version >= _MOST_VERSIONS:
        raise BackendError(f"version={version} must be below {_MOST_VERSIONS}: count the changes of the weights")


def check_complete(layout: WeightLayout, rank: int, loaded: Set[str] | None) -> None:
    """Refuses to commit an update before all of this rank's parameters came; None: there is no update.

    Raises:
        ReshardError: naming those that did not.
    """
    if loaded is not None and (missing := sorted(layout.boxes_of(rank).keys() - loaded)):
        raise ReshardError(f"the parameters {missing} did not arrive: load them before commit_weights")


def check_shards(
    layout: WeightLayout, rank: int, shards: Mapping[str, Sequence[torch.Tensor]], loaded: Set[str]
) -> None:
    """Refuses what is not this rank's boxes of some parameters that did not come before; see `SupportsShardLoading`.

    Args:
        layout: the engine's.
        rank: whose boxes these must be.
        shards: as given to `load_shards`.
        loaded: names that have come in this update.

    Raises:
        ReshardError: naming what is wrong.
    """
    if not isinstance(shards, Mapping):
        raise ReshardError(f"shards={show(shards)}: give a mapping from names to lists of one tensor per box")
    if loose := [name for name, parts in shards.items() if not isinstance(parts, list | tuple)]:
        raise ReshardError(f"the shards of {loose} are not lists: give a list of one tensor per box")
    tensors = [(name, part) for name, parts in shards.items() for part in parts]
    if empty := sorted({name for name, part in tensors if getattr(part, "is_meta", False)}):
        raise ReshardError(f"the shards of {empty} are on the device 'meta', without contents: give tensors with some")
    if again := sorted(loaded & shards.keys()):
        raise ReshardError(f"the parameters {again} came twice in one update")
    held = layout.boxes_of(rank)
    wanted = {name: held[name] for name in shards if name in held}
    check_weights(replace(layout, boxes={rank: wanted}), rank, shards, "received")
