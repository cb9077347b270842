"""Inputs from which the worker of a role is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_algorithms.config import Config
    from hf_algorithms.models.initial_model import InitialModel
    from hf_engine import LoraConfig
    from hf_protocols import ModelPlan

__all__ = ["RoleSetup"]


@dataclass(frozen=True, kw_only=True)
class RoleSetup:
    """A role in a run, as a worker's `configure` sees it.

    Attributes:
        role: its name.
        config: the run's.
        placed: where the plan puts the role.
        model: the role's own model; for a role without a model, the one of `[model]`.
        stop_ids: tokens at which responses end.
        search_path: folders where a user's functions are looked for first.
    """

    role: str
    config: Config
    placed: ModelPlan
    model: InitialModel
    stop_ids: tuple[int, ...]
    search_path: Sequence[str]

    @property
    def lora(self) -> LoraConfig | None:
        """The adapters of roles that learn; None: whole weights are trained."""
        lora = self.config.model.lora
        return None if lora is None else lora.for_engine()
