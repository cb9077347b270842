"""The roles of a recipe: worker groups by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hf_protocols import ConfigError

if TYPE_CHECKING:
    from hf_controller import WorkerGroup

__all__ = ["Roles"]


class Roles:
    """``roles.actor.generate_sequences(...)``: every role of a recipe as an attribute.

    Raises:
        ConfigError: when a recipe asks for a role that the plan does not have.
    """

    def __init__(self, groups: Mapping[str, WorkerGroup]) -> None:
        self._groups = dict(groups)

    def __getattr__(self, role: str) -> WorkerGroup:
        groups = self.__dict__.get("_groups", {})
        if role not in groups:
            raise ConfigError(f"there is no role {role!r}: the plan has {', '.join(groups) or 'none'}")
        group: WorkerGroup = groups[role]
        return group
