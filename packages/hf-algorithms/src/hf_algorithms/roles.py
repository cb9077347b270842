"""The roles of a recipe: worker groups by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, cast

from hf_protocols import ConfigError
from hf_protocols.similar_names import find_similar
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_algorithms.workers.calls import (
        ActorCalls,
        AdvantageCalls,
        CostCalls,
        CriticCalls,
        PairScorerCalls,
        ReferenceCalls,
        RewardCalls,
    )
    from hf_controller import BatchFuture, WorkerGroup

__all__ = ["Roles", "call_keeping_scores", "is_scored", "least_rows", "list_trained"]

_SCORED, _SCORES = "model_scores", "compute_model_scores"
"""A column that a method reads where a model scores for its role, and the model's method that writes the column."""


class _ScoredGroup:
    """A group whose calls that read `model_scores` are given those of a model: another group scores the batch first."""

    def __init__(self, group: WorkerGroup, scorer: WorkerGroup, unscored: Collection[str]) -> None:
        self._group = group
        self._unscored = unscored
        self.scorer = scorer

    def is_scored(self, method: str) -> bool:
        """True if a call of this method is given the model's scores."""
        known = self._group.methods.get(method)
        return known is not None and f"{_SCORED}?" in (known.reads or ()) and method not in self._unscored

    def call_scored(self, method: str, batch: BatchFuture) -> BatchFuture:
        """Calls a method on a batch that has the model's scores."""
        result: BatchFuture = getattr(self._group, method)(batch)
        return result

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._group, name)
        if not self.is_scored(name):
            return found

        def call(batch: BatchFuture, *args: Any, **kwargs: Any) -> Any:
            return found(batch.union(getattr(self.scorer, _SCORES)(batch)), *args, **kwargs)

        return call


class _PlayedGroup:
    """A role that another group plays: that group's methods under the names of the role's own."""

    def __init__(self, group: WorkerGroup, methods: Mapping[str, str]) -> None:
        self._group = group
        self._names = dict(methods)

    @property
    def methods(self) -> Mapping[str, Any]:
        """Returns what the group registers for the methods of the role."""
        return {name: self._group.methods[other] for name, other in self._names.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, self._names.get(name, name))


class Roles:
    """`roles.actor.generate_sequences(...)`: every role of a recipe as an attribute.

    Type checkers know the calls of the shipped roles; those of a role of one's own are those of its `WorkerGroup`.

    Args:
        groups: by role.
        scorers: roles whose models score a batch before another role reads it, by that other role; see
            `Recipe.scorers`.
        unscored: methods that read no model's scores in this run.
        played: roles that other groups play; see `Recipe.played`.

    Raises:
        ConfigError: when a step asks for a role that the recipe does not have.
    """

    if TYPE_CHECKING:
        actor: ActorCalls
        advantage: AdvantageCalls
        cost: CostCalls
        cost_critic: CriticCalls
        critic: CriticCalls
        reference: ReferenceCalls
        reward: RewardCalls
        reward_model: PairScorerCalls

    def __init__(
        self,
        groups: Mapping[str, WorkerGroup],
        scorers: Mapping[str, str] | None = None,
        unscored: Collection[str] = (),
        played: Mapping[str, tuple[str, Mapping[str, str]]] | None = None,
    ) -> None:
        self._groups = dict(groups)
        self._played = {
            role: cast("WorkerGroup", _PlayedGroup(groups[owner], methods))
            for role, (owner, methods) in (played or {}).items()
            if owner in groups
        }
        for role, scorer in (scorers or {}).items():
            if role in groups and scorer in groups:
                self._groups[role] = cast("WorkerGroup", _ScoredGroup(groups[role], groups[scorer], unscored))

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
        groups = (*self._groups.values(), *self._played.values())
        return next((group for group in groups if method in group.methods), None)

    def __getattr__(self, role: str) -> WorkerGroup:
        return self.group(role)

    def group(self, role: str) -> WorkerGroup:
        """Returns the worker group of a role, also where another group plays it.

        Raises:
            ConfigError: if the recipe does not have the role.
        """
        groups = {**self.__dict__.get("_groups", {}), **self.__dict__.get("_played", {})}
        if role not in groups:
            near = find_similar(role, groups)
            hint = f"Did you mean {show(near[0])}?" if near else "Add it to the recipe's roles"
            raise ConfigError(
                f"roles.{role}: the recipe has no role of that name, its roles are {', '.join(groups) or 'none'}. "
                f"{hint}"
            )
        group: WorkerGroup = groups[role]
        return group


def is_scored(group: WorkerGroup, method: str) -> bool:
    """True if another role's model scores the batch of every call of this method."""
    return isinstance(group, _ScoredGroup) and group.is_scored(method)


def call_keeping_scores(group: WorkerGroup, method: str, batch: BatchFuture) -> BatchFuture:
    """Returns the batch with the column `model_scores`, and with those that the method writes.

    The model scores the batch once.

    Args:
        group: for which a model scores, see `is_scored`.
        method: that reads the model's scores.
        batch: as the method reads it.
    """
    assert isinstance(group, _ScoredGroup), "is_scored was asked"
    scored = batch.union(getattr(group.scorer, _SCORES)(batch))
    return scored.union(group.call_scored(method, scored))


def least_rows(group: WorkerGroup, method: str) -> int:
    """Returns the rows that a call of `group.method` needs so that each of the ranks that share them has one."""
    topology = group.topology
    shares = group.methods[method].protocol.distribute(topology, topology.world_size)
    rows = len({rows for rows in shares if len(rows)})
    if is_scored(group, method):
        return max(rows, least_rows(cast("_ScoredGroup", group).scorer, _SCORES))
    return rows


def list_trained(roles: Roles) -> dict[str, WorkerGroup]:
    """Groups whose state changes while a run trains, by role."""
    return {
        role: group
        for role, group in roles.groups.items()
        if "save_state" in group.methods and getattr(group.spec.worker, "trainable", False)
    }
