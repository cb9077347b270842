"""The roles of a recipe: worker groups by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hf_protocols import ConfigError
from hf_protocols.arguments import show
from hf_protocols.similar_names import find_similar

if TYPE_CHECKING:
    from hf_controller import WorkerGroup

__all__ = ["Roles", "least_rows"]


class Roles:
    """``roles.actor.generate_sequences(...)``: every role of a recipe as an attribute.

    Raises:
        ConfigError: when a step asks for a role that the recipe does not have.
    """

    def __init__(self, groups: Mapping[str, WorkerGroup]) -> None:
        self._groups = dict(groups)

    @property
    def groups(self) -> Mapping[str, WorkerGroup]:
        """The worker groups by role."""
        return dict(self._groups)

    def having(self, method: str) -> WorkerGroup:
        """Returns the first group whose worker registers this method.

        Raises:
            ConfigError: if no group has it.
        """
        found = self.find(method)
        if found is None:
            raise ConfigError(
                f"no role has the method {show(method)}: the roles are {', '.join(self._groups) or 'none'}"
            )
        return found

    def find(self, method: str) -> WorkerGroup | None:
        """Returns the first group whose worker registers this method; None if no group has it."""
        return next((group for group in self._groups.values() if method in group.methods), None)

    def __getattr__(self, role: str) -> WorkerGroup:
        groups = self.__dict__.get("_groups", {})
        if role not in groups:
            near = find_similar(role, groups)
            hint = f"Did you mean {show(near[0])}?" if near else "Add it to the recipe's roles"
            raise ConfigError(
                f"roles.{role}: the recipe has no role of that name, it has {', '.join(groups) or 'none'}. {hint}"
            )
        group: WorkerGroup = groups[role]
        return group


def least_rows(group: WorkerGroup, method: str) -> int:
    """Rows that a call of ``group.method`` needs so that each of the ranks that share them has one."""
    topology = group.topology
    shares = group.methods[method].protocol.distribute(topology, topology.world_size)
    return len({rows for rows in shares if len(rows)})
