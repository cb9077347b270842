"""The calls that a dataflow makes to each model, by stage and kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from hf_mapper._names import unknown_name
from hf_mapper.adapters import check_adapters
from hf_mapper.simulators.transfer import CallRows, count_call_rows
from hf_mapper.specs import WorkloadSpec
from hf_protocols import CallKind, ConfigError, Dataflow, ModelShape, PlanError
from hf_protocols.validation import show

__all__ = ["ModelDemand", "build_demands", "group_functions", "number_demands"]


@dataclass(frozen=True, kw_only=True)
class ModelDemand:
    """One model's part of an iteration: `calls[stage]` are the kinds of its calls there, in program order.

    `rows[stage]` are the rows of the same calls; without it, calls read and write no rows.

    Roles with equal demands are interchangeable for the search.
    """

    model: ModelShape
    calls: tuple[tuple[CallKind, ...], ...]
    rows: tuple[tuple[CallRows, ...], ...] = ()
    backends: tuple[str, ...] | None = None
    """Training backends to choose from for this model; None: those of the problem."""

    @property
    def kinds(self) -> frozenset[CallKind]:
        """The kinds of call that occur at all."""
        return frozenset(kind for stage in self.calls for kind in stage)

    def count(self, simulator: str) -> tuple[int, ...]:
        """Counts each stage's calls of `simulator`; a transition counts once in a stage that generates."""
        if simulator == "transition":
            return tuple(int("generation" in stage) for stage in self.calls)
        return tuple(sum(kind == simulator for kind in stage) for stage in self.calls)

    @property
    def trained(self) -> bool:
        """True if the model holds gradients and an optimizer."""
        return "training" in self.kinds

    @property
    def generates(self) -> bool:
        """True if the model needs a generation layout and a KV cache."""
        return "generation" in self.kinds


def build_demands(
    dataflow: Dataflow,
    models: Mapping[str, ModelShape],
    workload: WorkloadSpec,
    backends: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
) -> dict[str, ModelDemand]:
    """Returns the demand of every role that has a model, in the dataflow's order of roles.

    Demands include only `backends` that are given by role: models with other backends differ.

    Raises:
        ConfigError: for a model whose role is not in the dataflow, or a backend whose role has no model (with the
            nearest); for a model whose positions are fewer than the workload's tokens, or without a layer of those
            that get adapters.
        PlanError: for a role that trains or generates and has no model, or when no role has one.
    """
    for role in models:
        if role not in dataflow.roles:
            raise unknown_name(f"dataflow {show(dataflow.name)}: role", role, dataflow.roles)
    for call in dataflow.calls:
        if call.kind in ("training", "generation") and call.role not in models:
            raise PlanError(
                f"{call.role}.{call.method} is a {call.kind} call. Set models[{show(call.role)}] to a ModelShape"
            )
    if not models:
        raise PlanError(f"dataflow {show(dataflow.name)}: no role has a ModelShape, so there is nothing to place")
    dataflow = dataflow.with_models(models)
    for role, model in models.items():
        if workload.sequence_tokens > model.max_positions:
            raise ConfigError(
                f"{role}: prompt_tokens + response_tokens = {workload.sequence_tokens} exceeds the "
                f"{model.max_positions} positions of {model.name}. Shorten one or choose another model"
            )
    for role in dict.fromkeys(call.role for call in dataflow.calls if call.kind == "training"):
        if workload.adapters is not None:
            check_adapters(role, models[role], workload.adapters)
    of_role = backends if isinstance(backends, Mapping) else {}
    for role in of_role:
        if role not in models:
            raise unknown_name("backends: role", role, tuple(models))
    return {
        role: _build_demand(role, models[role], dataflow, workload, of_role.get(role))
        for role in dataflow.roles
        if role in models
    }


def _build_demand(
    role: str, model: ModelShape, dataflow: Dataflow, workload: WorkloadSpec, backends: Sequence[str] | None
) -> ModelDemand:
    stages = [[call for call in stage if call.role == role] for stage in dataflow.stages()]
    return ModelDemand(
        model=model,
        calls=tuple(tuple(call.kind for call in stage) for stage in stages),
        rows=tuple(tuple(count_call_rows(call, workload) for call in stage) for stage in stages),
        backends=None if backends is None else tuple(backends),
    )


def number_demands(demands: Iterable[ModelDemand]) -> list[ModelDemand]:
    """The different demands among `demands`: those of inference first, then training, then generation."""
    return sorted(dict.fromkeys(demands), key=lambda demand: (demand.generates, demand.trained))


def group_functions(dataflow: Dataflow, models: Mapping[str, ModelShape]) -> tuple[tuple[str, ...], ...]:
    """Roles without a model (reward functions, advantages) by host slot, in the dataflow's order.

    A slot has one process, whose calls run one after another. Two roles share it if each call of one has to wait for
    each call of the other anyway, directly or through other calls.
    """
    before = dataflow.predecessors()
    calls = {role: [call for call in dataflow.calls if call.role == role] for role in dataflow.roles}

    def can_share(role: str, slot: list[str]) -> bool:
        pairs = product(calls[role], (call for other in slot for call in calls[other]))
        return all(one in before[other] or other in before[one] for one, other in pairs)

    slots: list[list[str]] = []
    for role in (each for each in dataflow.roles if each not in models):
        slot = next((each for each in slots if can_share(role, each)), None)
        if slot is None:
            slots.append([role])
        else:
            slot.append(role)
    return tuple(map(tuple, slots))
