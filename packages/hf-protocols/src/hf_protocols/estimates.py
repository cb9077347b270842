"""The estimates on which the mapper based a plan, as they stand in the plan's JSON. Seconds and bytes are predictions.

`PlanEstimates.from_body` checks every value once, where a plan is read: a plan is a file that anybody may have edited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, TypeVar

from hf_protocols.errors import PlanError
from hf_protocols.validation import shorten, show

__all__ = [
    "AdapterEstimate",
    "ModelEstimate",
    "PlanEstimates",
    "PoolEstimate",
    "SearchEstimate",
    "StageEstimate",
]

_LARGEST = 1e300
"""Largest value that is accepted; beyond it, sums over roles and stages leave the range of a float."""

_LEFT_OUT = ("machines", "gap", "placements_tried", "adapters")
"""Fields that the JSON omits if they are None; other fields that are None are null in the JSON."""

Read = TypeVar("Read")


@dataclass(frozen=True, kw_only=True)
class StageEstimate:
    """A stage of the iteration.

    Attributes:
        calls: `role.method` of each call; calls of different pools run at the same time.
        latency_s: seconds of the slowest pool.
        waits_for: name of that pool, None for a stage in which no model runs.
    """

    calls: tuple[str, ...]
    latency_s: float
    waits_for: str | None


@dataclass(frozen=True, kw_only=True)
class PoolEstimate:
    """A pool with models.

    Attributes:
        stage_s: seconds in each stage, `[stages]`.
        memory_bytes: bytes used on each device: the states of all models, and the largest call.
        usable_bytes: bytes on each device that models may fill.
        machines: name of the machines' entry in the cluster, such as `h100#2`; None if unknown.
    """

    stage_s: tuple[float, ...]
    memory_bytes: float
    usable_bytes: float
    machines: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelEstimate:
    """The model of one role.

    Attributes:
        stage_s: seconds in each stage, `[stages]`.
        state_bytes: bytes on each device between calls.
        work_bytes: bytes on each device that its largest call adds.
        host_bytes: bytes of host memory for each device, 0 for a model that is not offloaded.
        generation_waves: waves in which a replica generates its prompts, None for a model that does not generate.
    """

    stage_s: tuple[float, ...]
    state_bytes: float
    work_bytes: float
    host_bytes: float
    generation_waves: int | None


@dataclass(frozen=True, kw_only=True)
class SearchEstimate:
    """Result of the search for the plan.

    Attributes:
        complete: False for a search that was stopped: the plan is the best so far.
        gap: no plan takes less than `iteration_s * (1 - gap)`. None for a placement that was given.
        placements_tried: number of placements that were compared. None for a placement that was given.
    """

    complete: bool = True
    gap: float | None = None
    placements_tried: int | None = None


@dataclass(frozen=True, kw_only=True)
class AdapterEstimate:
    """Low-rank adapters that are trained in place of whole weights: their rank, their parameters by role."""

    rank: int
    parameters: Mapping[str, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", dict(self.parameters))


@dataclass(frozen=True, kw_only=True)
class PlanEstimates:
    """The estimates of a plan.

    Attributes:
        iteration_s: seconds of an iteration, the sum of its stages.
        stages: in the order in which they run.
        pools: by name, of the pools that have models.
        models: by role.
        idle_gpus: devices of the cluster that no pool uses.
        search: result of the search.
        largest_generation: the largest generation layout that was allowed, as `pp-tp`. None for any, or if unknown.
        adapters: None where whole weights are trained.
    """

    iteration_s: float
    stages: tuple[StageEstimate, ...]
    pools: Mapping[str, PoolEstimate]
    models: Mapping[str, ModelEstimate]
    idle_gpus: int
    search: SearchEstimate = SearchEstimate()
    largest_generation: str | None = None
    adapters: AdapterEstimate | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "pools", dict(self.pools))
        object.__setattr__(self, "models", dict(self.models))

    @classmethod
    def from_body(cls, body: Mapping[str, object]) -> PlanEstimates:
        """Returns the estimates that an object of JSON holds.

        Raises:
            PlanError: for an unknown or missing key or a value of another kind, with its place in the plan.
        """
        given = _Value("", body).read_fields(cls)
        stages = given["stages"].read_all(_read_stage)
        return cls(
            iteration_s=given["iteration_s"].read_number(),
            stages=stages,
            pools=given["pools"].read_each(lambda pool: _read_pool(pool, len(stages))),
            models=given["models"].read_each(lambda model: _read_model(model, len(stages))),
            idle_gpus=given["idle_gpus"].read_whole(),
            search=given["search"].read_unless_null(_read_search) or SearchEstimate(),
            largest_generation=given["largest_generation"].read_unless_null(_Value.read_text),
            adapters=given["adapters"].read_unless_null(_read_adapters),
        )

    def to_body(self) -> dict[str, object]:
        """Returns the object of JSON that `from_body` reads."""
        return asdict(self, dict_factory=_build_object)


def _build_object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in pairs if value is not None or key not in _LEFT_OUT}


@dataclass(frozen=True)
class _Value:
    """A value of JSON and its place in the estimates, empty for the whole; a value of another kind is refused."""

    place: str
    value: object

    @property
    def _name(self) -> str:
        return f"estimates.{shorten(self.place)}" if self.place else "estimates"

    def refuse(self, wanted: str) -> PlanError:
        return PlanError(f"{self._name} of the plan = {show(self.value)}: it is not {wanted}. Regenerate the plan")

    def read_fields(self, kind: type) -> dict[str, _Value]:
        """A value for every field of a dataclass, null for one that is absent and has a default."""
        given = self.read_each(lambda value: value)
        known = {each.name: each for each in fields(kind)}
        for key in given:
            if key not in known:
                reason = f"has the key {show(key)}, which is none of {', '.join(known)}"
                raise PlanError(f"{self._name} of the plan {reason}. Regenerate the plan")
        for name, each in known.items():
            if name not in given and each.default is MISSING:
                raise self.refuse(f"an object with {name!r}")
        return {name: given.get(name) or _Value(name, None) for name in known}

    def read_each(self, read: Callable[[_Value], Read]) -> dict[str, Read]:
        if not isinstance(self.value, Mapping):
            raise self.refuse("an object")
        prefix = f"{self.place}." if self.place else ""
        return {key: read(_Value(f"{prefix}{key}", value)) for key, value in self.value.items()}

    def read_all(self, read: Callable[[_Value], Read]) -> tuple[Read, ...]:
        if not isinstance(self.value, list):
            raise self.refuse("a list")
        return tuple(read(_Value(f"{self.place}[{number}]", value)) for number, value in enumerate(self.value))

    def read_unless_null(self, read: Callable[[_Value], Read]) -> Read | None:
        return None if self.value is None else read(self)

    def read_number(self) -> float:
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _LARGEST:
            raise self.refuse("a number of at least 0")
        return value

    def read_whole(self) -> int:
        if type(self.value) is not int or not 0 <= self.value < _LARGEST:
            raise self.refuse("a whole number of at least 0")
        return self.value

    def read_flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.refuse("true or false")
        return self.value

    def read_text(self) -> str:
        if not isinstance(self.value, str):
            raise self.refuse("text")
        return self.value


def _read_stage(value: _Value) -> StageEstimate:
    given = value.read_fields(StageEstimate)
    return StageEstimate(
        calls=given["calls"].read_all(_Value.read_text),
        latency_s=given["latency_s"].read_number(),
        waits_for=given["waits_for"].read_unless_null(_Value.read_text),
    )


def _read_pool(value: _Value, num_stages: int) -> PoolEstimate:
    given = value.read_fields(PoolEstimate)
    return PoolEstimate(
        stage_s=_read_seconds(given["stage_s"], num_stages),
        memory_bytes=given["memory_bytes"].read_number(),
        usable_bytes=_read_positive(given["usable_bytes"]),
        machines=given["machines"].read_unless_null(_Value.read_text),
    )


def _read_model(value: _Value, num_stages: int) -> ModelEstimate:
    given = value.read_fields(ModelEstimate)
    return ModelEstimate(
        stage_s=_read_seconds(given["stage_s"], num_stages),
        state_bytes=given["state_bytes"].read_number(),
        work_bytes=given["work_bytes"].read_number(),
        host_bytes=given["host_bytes"].read_number(),
        generation_waves=given["generation_waves"].read_unless_null(_Value.read_whole),
    )


def _read_search(value: _Value) -> SearchEstimate:
    given = value.read_fields(SearchEstimate)
    return SearchEstimate(
        complete=given["complete"].read_flag(),
        gap=given["gap"].read_unless_null(_Value.read_number),
        placements_tried=given["placements_tried"].read_unless_null(_Value.read_whole),
    )


def _read_adapters(value: _Value) -> AdapterEstimate:
    given = value.read_fields(AdapterEstimate)
    return AdapterEstimate(rank=given["rank"].read_whole(), parameters=given["parameters"].read_each(_Value.read_whole))


def _read_seconds(value: _Value, num_stages: int) -> tuple[float, ...]:
    seconds = value.read_all(_Value.read_number)
    if len(seconds) != num_stages:
        raise value.refuse(f"a list of {num_stages} numbers, one for each stage")
    return seconds


def _read_positive(value: _Value) -> float:
    number = value.read_number()
    if number < 1:
        raise value.refuse("a number of at least 1")
    return number
