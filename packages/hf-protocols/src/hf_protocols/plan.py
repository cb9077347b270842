"""The mapping plan: which pools there are and which model runs where, in which layout. Pure data, JSON in and out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hf_protocols.arguments import check_count, check_kind
from hf_protocols.errors import HybridFlowError, PlanError
from hf_protocols.topology import GenerationSpec, ParallelSpec, Topology

__all__ = ["SCHEMA_VERSION", "MachinePlan", "MappingPlan", "ModelPlan", "PoolPlan"]

SCHEMA_VERSION = 1
"""Version of the plan's JSON; a release reads its own version only."""


@dataclass(frozen=True, kw_only=True)
class MachinePlan:
    """Slots on one machine; ``gpu_kind`` is a name of the mapper's catalogue, ``"cpu"`` for host processes."""

    gpu_kind: str
    slots: int

    def __post_init__(self) -> None:
        check_kind(PlanError, "a machine's gpu_kind", self.gpu_kind, str, "a name, such as 'h100' or 'cpu'")
        check_count(PlanError, "a machine's slots", self.slots)


@dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """A set of slots that nothing outside the pool uses; its models share them. Ranks go by (machine, device)."""

    name: str
    machines: tuple[MachinePlan, ...]

    def __post_init__(self) -> None:
        check_kind(PlanError, "a pool's name", self.name, str, "a name")
        object.__setattr__(self, "machines", tuple(self.machines))
        if not self.machines:
            raise PlanError(f"pool {self.name!r} has no machines: give it at least one")

    @property
    def num_slots(self) -> int:
        """Slots over all machines."""
        return sum(machine.slots for machine in self.machines)


_KINDS = (
    ("pool", str, "a pool's name"),
    ("backend", str, "a backend's name"),
    ("train", ParallelSpec | None, "a ParallelSpec or None"),
    ("generation", GenerationSpec | None, "a GenerationSpec or None"),
    ("offload", bool, "true or false"),
)


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """Where and how one role runs.

    ``train`` is its layout in training and inference, None for a role without a model (a function);
    ``generation`` None for a model that does not generate. ``micro_batch_tokens`` bounds the tokens of one forward.
    """

    pool: str
    backend: str
    train: ParallelSpec | None = None
    generation: GenerationSpec | None = None
    offload: bool = False
    micro_batch_tokens: int = 8192

    def __post_init__(self) -> None:
        check_count(PlanError, "a model's micro_batch_tokens", self.micro_batch_tokens)
        for name, kind, wanted in _KINDS:
            check_kind(PlanError, f"a model's {name}", getattr(self, name), kind, wanted)
        if self.train and self.generation:
            Topology(self.train, self.generation)  # refuses replicas that do not divide the ranks


@dataclass(frozen=True, kw_only=True)
class MappingPlan:
    """Pools, the model of every role, and the estimates that led to the choice.

    Raises:
        PlanError: if a model names a pool that does not exist, needs another number of ranks than its pool has
            slots, or two pools share a name.
    """

    pools: tuple[PoolPlan, ...]
    models: Mapping[str, ModelPlan]
    estimates: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pools", tuple(self.pools))
        object.__setattr__(self, "models", dict(self.models))
        names = [pool.name for pool in self.pools]
        if len(set(names)) < len(names):
            raise PlanError(f"two pools share a name among {', '.join(names)}: pools never overlap")
        for role, model in self.models.items():
            if model.pool not in names:
                raise PlanError(f"{role} runs on pool {model.pool!r}, which is none of {', '.join(names)}")
            slots = self.pool(model.pool).num_slots
            if model.train and model.train.world_size != slots:
                raise PlanError(
                    f"{role} has pp_size * tp_size * cp_size * dp_size = {model.train.world_size} ranks, "
                    f"its pool {model.pool!r} has {slots} slots: make them equal"
                )

    def pool(self, name: str) -> PoolPlan:
        """The pool called ``name``.

        Raises:
            PlanError: if there is none.
        """
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise PlanError(f"this plan has no pool {name!r}: its pools are {', '.join(pool.name for pool in self.pools)}")

    def roles_of(self, pool: str) -> tuple[str, ...]:
        """The roles that share ``pool``, in the plan's order."""
        return tuple(role for role, model in self.models.items() if model.pool == pool)

    def to_json(self) -> str:
        """The plan as JSON text, keys in a fixed order, ending in a newline.

        Raises:
            PlanError: for estimates that JSON cannot hold.
        """
        body = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        try:
            return json.dumps(body, indent=2, allow_nan=False) + "\n"
        except (TypeError, ValueError) as error:
            raise PlanError(f"the plan's estimates do not fit into JSON: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> MappingPlan:
        """Read what :meth:`to_json` wrote.

        Raises:
            PlanError: for text that is no plan, another schema version (naming both), or an unknown key.
            TopologyError: for sizes that do not divide.
        """
        try:
            body = json.loads(text, parse_constant=_refuse_constant)
            if not isinstance(body, dict):
                raise PlanError("this is no mapping plan: the JSON is no object")
            version = body.pop("schema_version", None)
            if type(version) is not int or version != SCHEMA_VERSION:
                raise PlanError(
                    f"this plan has schema_version {version!r}, this release reads {SCHEMA_VERSION}: make the plan anew"
                )
            return cls(
                pools=tuple(_read_pool(**pool) for pool in body.pop("pools")),
                models={role: _read_model(**model) for role, model in body.pop("models").items()},
                **body,
            )
        except HybridFlowError:
            raise
        except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
            raise PlanError(f"this is no mapping plan: {type(error).__name__}: {error}") from error


def _refuse_constant(name: str) -> float:
    raise PlanError(f"{name} is no number of JSON: make the plan anew")


def _read_pool(*, name: str, machines: list[dict[str, Any]]) -> PoolPlan:
    return PoolPlan(name=name, machines=tuple(MachinePlan(**machine) for machine in machines))


def _read_model(
    *, train: dict[str, int] | None = None, generation: dict[str, int] | None = None, **rest: Any
) -> ModelPlan:
    return ModelPlan(
        train=None if train is None else ParallelSpec(**train),
        generation=None if generation is None else GenerationSpec(**generation),
        **rest,
    )
