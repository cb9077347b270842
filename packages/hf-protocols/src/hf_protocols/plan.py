"""The mapping plan: pools, and the pool and layout of each model. Pure data, read from and written to JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from hf_protocols._json import parse_json
from hf_protocols.errors import HybridFlowError, PlanError
from hf_protocols.estimates import PlanEstimates
from hf_protocols.paths import read_text
from hf_protocols.topology import GenerationSpec, ParallelSpec, Topology
from hf_protocols.validation import Checks, shorten, show

__all__ = ["SCHEMA_VERSION", "MachinePlan", "MappingPlan", "ModelPlan", "PoolPlan", "load_plan"]

_check = Checks(PlanError)

Spec = TypeVar("Spec")

Reader = Callable[[str, Any], Any]
"""(place of the value in the plan, the value) -> the field of a dataclass."""

SCHEMA_VERSION = 1
"""Version of the plan's JSON; a release reads its own version only."""


@dataclass(frozen=True, kw_only=True)
class MachinePlan:
    """Slots on one machine; `gpu_kind` is a name of the mapper's catalogue, `"cpu"` for host processes."""

    gpu_kind: str
    slots: int

    def __post_init__(self) -> None:
        _check.kind("a machine's gpu_kind", self.gpu_kind, str, "a name, such as 'h100' or 'cpu'")
        _check.count("a machine's slots", self.slots)


@dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """A set of slots that only this pool uses; its models share them. Ranks go by (machine, device)."""

    name: str
    machines: tuple[MachinePlan, ...]

    def __post_init__(self) -> None:
        _check.kind("a pool's name", self.name, str, "a name")
        what = f"the machines of pool {show(self.name)}"
        machines = _check.kinds(what, self.machines, MachinePlan, "MachinePlans")
        object.__setattr__(self, "machines", machines)
        if not self.machines:
            raise PlanError(f"pool {show(self.name)} has no machines. Add at least one")

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
    """The pool, backend and layouts of one role.

    `train` is its layout in training and inference, None for a role without a model (a function);
    `generation` None for a model that does not generate. `micro_batch_tokens` bounds the tokens of one forward.
    """

    pool: str
    backend: str
    train: ParallelSpec | None = None
    generation: GenerationSpec | None = None
    offload: bool = False
    micro_batch_tokens: int = 8192

    def __post_init__(self) -> None:
        _check.count("a model's micro_batch_tokens", self.micro_batch_tokens)
        for name, kind, wanted in _KINDS:
            _check.kind(f"a model's {name}", getattr(self, name), kind, wanted)
        if self.generation and not self.train:
            raise PlanError(
                f"a model's generation={self.generation} without train. Set train to the layout of the same ranks"
            )
        if self.train and self.generation:
            Topology(self.train, self.generation)  # refuses replicas that do not divide the ranks


@dataclass(frozen=True, kw_only=True)
class MappingPlan:
    """Pools, the model of every role, and the estimates that led to the choice; these are None for a plan written by
    hand.

    Raises:
        PlanError: if a model names a pool that does not exist, needs another number of ranks than its pool has
            slots, or two pools share a name; for values of other kinds.
    """

    pools: tuple[PoolPlan, ...]
    models: Mapping[str, ModelPlan]
    estimates: PlanEstimates | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "pools", _check.kinds("a plan's pools", self.pools, PoolPlan, "PoolPlans"))
        wanted = "a mapping of roles to ModelPlans"
        _check.kind("a plan's models", self.models, Mapping, wanted)
        _check.kinds("a plan's models", self.models.values(), ModelPlan, wanted)
        for role in self.models:
            _check.name("a role of a plan's models", role)
        _check.kind("a plan's estimates", self.estimates, PlanEstimates | None, "PlanEstimates or None")
        object.__setattr__(self, "models", dict(self.models))
        names = [pool.name for pool in self.pools]
        if len(set(names)) < len(names):
            raise PlanError(f"two pools share a name among {', '.join(names)}: pools never overlap")
        for role, model in self.models.items():
            if model.pool not in names:
                raise PlanError(f"{shorten(role)} runs on pool {show(model.pool)}, which is none of {', '.join(names)}")
            slots = self.pool(model.pool).num_slots
            if model.train and model.train.world_size != slots:
                raise PlanError(
                    f"{role} has pp_size * tp_size * cp_size * dp_size = {model.train.world_size} ranks, "
                    f"its pool {show(model.pool)} has {slots} slots. Make them equal"
                )

    def pool(self, name: str) -> PoolPlan:
        """Returns the pool called `name`.

        Raises:
            PlanError: if the plan does not have this pool.
        """
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise PlanError(
            f"this plan has no pool {show(name)}: its pools are {', '.join(pool.name for pool in self.pools)}"
        )

    def roles_of(self, pool: str) -> tuple[str, ...]:
        """Returns the roles that share `pool`, in the plan's order."""
        return tuple(role for role, model in self.models.items() if model.pool == pool)

    def require_estimates(self) -> PlanEstimates:
        """Returns the estimates.

        Raises:
            PlanError: for a plan without estimates.
        """
        if self.estimates is None:
            raise PlanError("this plan lacks estimates. Make it with map_dataflow to report on it")
        return self.estimates

    def to_json(self) -> str:
        """Returns the plan as JSON text, with keys in a fixed order and a newline at the end.

        Raises:
            PlanError: for estimates that JSON cannot hold.
        """
        estimates = {} if self.estimates is None else self.estimates.to_body()
        body = {"schema_version": SCHEMA_VERSION, **asdict(self), "estimates": estimates}
        try:
            return json.dumps(body, indent=2, allow_nan=False) + "\n"
        except (TypeError, ValueError) as error:
            raise PlanError(f"the plan's estimates do not fit into JSON: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> MappingPlan:
        """Reads the text that `to_json` wrote.

        Raises:
            PlanError: for text that is not a plan, another schema version (naming both), an unknown key, or a value
                that is refused, with its place.
        """
        _check.kind(f"{_NO_PLAN}: text", text, str | bytes, "what to_json wrote")
        body = parse_json(PlanError, _NO_PLAN, text, **_HOOKS)
        if not isinstance(body, dict):
            raise PlanError(f"{_NO_PLAN}: the JSON is not an object. {_REMEDY}")
        _refuse_surrogates(body)
        version = body.pop("schema_version", None)
        if type(version) is not int or version != SCHEMA_VERSION:
            raise PlanError(
                f"this plan has schema_version {show(version)}, this release reads {SCHEMA_VERSION}. {_REMEDY}"
            )
        return _read(cls, "the plan", body, pools=_read_pools, models=_read_models, estimates=_read_plan_estimates)


def load_plan(path: Path, what: str = "the plan") -> MappingPlan:
    """Returns the plan that a file holds.

    Args:
        path: of the file.
        what: stands before the path in a message.

    Raises:
        ConfigError: for a file that cannot be read or is not UTF-8 text.
        PlanError: as `MappingPlan.from_json`, naming the file.
    """
    text = read_text(path, what, "a plan, as `hybridflow plan --json` prints it")
    try:
        return MappingPlan.from_json(text)
    except PlanError as error:
        reason, remedy = str(error).removesuffix(f". {_REMEDY}"), _REMEDY
        if reason.startswith(_NO_PLAN):
            reason, remedy = f"is {reason}", "Write one with `hybridflow plan CONFIG --json`"
        raise PlanError(f"{what} {path}: {reason}. {remedy}") from None


_REMEDY = "Regenerate the plan"
_NO_PLAN = "not a mapping plan"


def _refuse_surrogates(body: Any) -> None:
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise PlanError(f"{_NO_PLAN}: a text contains an unpaired surrogate. {_REMEDY}") from None


def _refuse_constant(name: str) -> float:
    raise PlanError(f"{name} is not a number of JSON. {_REMEDY}")


def _read_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise PlanError(f"{text} is outside the range of a float. {_REMEDY}")
    return number


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise PlanError(f"{_NO_PLAN}: the key {show(twice)} stands twice in one object")
    return body


_HOOKS: dict[str, Callable[[Any], Any]] = {
    "parse_constant": _refuse_constant,
    "parse_float": _read_number,
    "object_pairs_hook": _refuse_twice,
}


def _read(kind: type[Spec], place: str, value: Any, **readers: Reader) -> Spec:
    """Builds a dataclass from the JSON object at `place`; `readers` convert its fields."""
    known = {each.name: each for each in fields(cast("Any", kind))}
    given = _as_object(place, value)
    for key in given:
        if key not in known:
            raise PlanError(f"{_NO_PLAN}: {place} has the key {show(key)}, which is none of {', '.join(known)}")
    required = [name for name, each in known.items() if each.default is each.default_factory is MISSING]
    lacking = [name for name in required if name not in given]
    if lacking:
        raise PlanError(f"{_NO_PLAN}: {place} lacks {', '.join(lacking)}")
    path = "" if place == "the plan" else f"{place}."
    read = {key: readers[key](f"{path}{key}", each) if key in readers else each for key, each in given.items()}
    try:
        return kind(**read)
    except HybridFlowError as error:
        if not path:
            raise
        raise PlanError(f"{_NO_PLAN}: {place}: {error}") from None


def _as_object(place: str, value: Any) -> dict[str, Any]:
    _check.kind(f"{_NO_PLAN}: {place}", value, dict, "an object of JSON")
    return cast("dict[str, Any]", value)


def _read_list(place: str, value: Any, read: Reader) -> tuple[Any, ...]:
    _check.kind(f"{_NO_PLAN}: {place}", value, list, "a list")
    return tuple(read(f"{place}[{index}]", each) for index, each in enumerate(value))


def _read_pools(place: str, value: Any) -> tuple[PoolPlan, ...]:
    return _read_list(place, value, partial(_read, PoolPlan, machines=_read_machines))


def _read_machines(place: str, value: Any) -> tuple[MachinePlan, ...]:
    return _read_list(place, value, partial(_read, MachinePlan))


def _read_models(place: str, value: Any) -> dict[str, ModelPlan]:
    sizes: dict[str, Reader] = {
        "train": partial(_read_sizes, ParallelSpec),
        "generation": partial(_read_sizes, GenerationSpec),
    }
    return {
        role: _read(ModelPlan, f"{place}.{shorten(role)}", model, **sizes)
        for role, model in _as_object(place, value).items()
    }


def _read_plan_estimates(place: str, value: Any) -> PlanEstimates | None:
    body = _as_object(place, value)
    return PlanEstimates.from_body(body) if body else None


def _read_sizes(kind: type[Spec], place: str, value: Any) -> Spec | None:
    return None if value is None else _read(kind, place, value)
