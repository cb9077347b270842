"""State of a training backend between steps, as boxes of tensors under Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from hf_engine.resharding.boxes import Box

if TYPE_CHECKING:
    import torch

__all__ = ["BUFFERS", "MOMENTS", "WEIGHTS", "FillPiece", "StateParts", "StateProgress", "StoredPiece"]

WEIGHTS = "weights"
MOMENTS = ("exp_avg", "exp_avg_sq")
BUFFERS = "buffers"
"""Kinds of tensors, and what the files of each begin with."""


@dataclass(frozen=True)
class StoredPiece:
    """A box of one tensor."""

    kind: str
    name: str
    box: Box
    tensor: torch.Tensor
    """In the shape of the box."""


FillPiece: TypeAlias = "Callable[[str, str, Box, torch.Tensor], None]"
"""Copies the stored values of (kind, name, box) into a tensor of the box's shape, on any device."""


@dataclass(frozen=True, kw_only=True)
class StateProgress:
    """State that is not a tensor and changes while a model is trained."""

    optimizer_steps: int = 0
    weight_changes: int = 0
    weight_version: int = 0
    """Of the caller, such as that of the last generation."""
    learning_rate: tuple[float, bool] | None = None
    """Arguments of the last call of `set_learning_rate`; None without one."""


class StateParts(Protocol):
    """The tensors of one rank, to be stored and filled."""

    backend: str
    """Name of the training backend."""
    head: str
    dtype: str
    """Of the weights that are stored, by torch's name; moments are float32."""
    seed: int
    layout: Mapping[str, Any]
    """Sizes and order of the ranks."""
    optimizer: Mapping[str, Any] | None
    """Its name and hyperparameters; None for a frozen model."""
    base: Mapping[str, Any] | None
    """Settings of adapters, and the digest of the weights that they belong to; None without adapters."""
    kinds: tuple[str, ...]
    """`WEIGHTS`, and `MOMENTS` where there is an optimizer."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of every whole parameter that is stored."""

    def held(self) -> Iterable[tuple[str, Box]]:
        """Boxes of parameters that this rank holds, by name."""
        ...

    def stored(self) -> Iterator[StoredPiece]:
        """Boxes that this rank stores, each element once over all ranks; valid until the next one. Collective."""
        ...

    def fill(self, fill: FillPiece) -> None:
        """Has every box that `held` names filled, for every kind."""
        ...

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Persistent buffers, live and whole on every rank."""
        ...
