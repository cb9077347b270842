"""The estimates of a plan, checked before tables and pages show them: a plan is a file that anybody may have edited."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hf_protocols import MappingPlan, PlanError
from hf_protocols.validation import shorten, show

__all__ = ["check_estimates"]

_REQUIRED = ("iteration_s", "stages", "pools", "models", "idle_gpus")
_LARGEST = 1e300
"""Beyond it, sums over roles and stages leave the range of a float."""

Check = Callable[[str, Any], None]


def check_estimates(plan: MappingPlan) -> None:
    """Refuses a plan whose estimates are not the mapper's.

    Raises:
        PlanError: naming the estimates that it lacks, or the place of one that is not as the mapper writes it.
    """
    estimates = plan.estimates
    if missing := [key for key in _REQUIRED if key not in estimates]:
        raise PlanError(f"this plan lacks estimates ({', '.join(missing)}): make it with map_dataflow to report on it")
    _check_number("iteration_s", estimates["iteration_s"])
    _check_whole("idle_gpus", estimates["idle_gpus"])
    _check_all("stages", estimates["stages"], _check_stage)
    num_stages = len(estimates["stages"])

    def check_pool(place: str, value: Any) -> None:
        _check_keys(place, value, {"memory_bytes": _check_number, "usable_bytes": _check_positive})
        _check_seconds(place, value, num_stages)

    def check_model(place: str, value: Any) -> None:
        numbers = {"state_bytes": _check_number, "work_bytes": _check_number, "generation_waves": _check_waves}
        _check_keys(place, value, numbers)
        _check_seconds(place, value, num_stages)

    _check_each("pools", estimates["pools"], check_pool)
    _check_each("models", estimates["models"], check_model)
    if (found := estimates.get("search")) is not None:
        _check_keys("search", found, {"complete": _check_flag})
        if "gap" in found:
            _check_number("search.gap", found["gap"])
    if (adapters := estimates.get("adapters")) is not None:
        _check_keys("adapters", adapters, {"rank": _check_whole})
        _check_each("adapters.parameters", _get("adapters", adapters, "parameters"), _check_whole)


def _refuse(place: str, value: Any, wanted: str) -> PlanError:
    return PlanError(f"estimates.{shorten(place)} of the plan = {show(value)}: it is not {wanted}. Regenerate the plan")


def _get(place: str, value: Any, key: str) -> Any:
    if not isinstance(value, Mapping) or key not in value:
        raise _refuse(place, value, f"an object with {key!r}")
    return value[key]


def _check_keys(place: str, value: Any, checks: Mapping[str, Check]) -> None:
    for key, check in checks.items():
        check(f"{place}.{key}", _get(place, value, key))


def _check_each(place: str, value: Any, check: Check) -> None:
    if not isinstance(value, Mapping):
        raise _refuse(place, value, "an object")
    for key, each in value.items():
        check(f"{place}.{key}", each)


def _check_all(place: str, value: Any, check: Check) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _refuse(place, value, "a list")
    for number, each in enumerate(value):
        check(f"{place}[{number}]", each)


def _check_stage(place: str, value: Any) -> None:
    _check_keys(place, value, {"latency_s": _check_number})
    _check_all(f"{place}.calls", _get(place, value, "calls"), _check_text)
    if (waits_for := _get(place, value, "waits_for")) is not None:
        _check_text(f"{place}.waits_for", waits_for)


def _check_seconds(place: str, value: Any, num_stages: int) -> None:
    seconds = _get(place, value, "stage_s")
    _check_all(f"{place}.stage_s", seconds, _check_number)
    if len(seconds) != num_stages:
        raise _refuse(f"{place}.stage_s", seconds, f"a list of {num_stages} numbers, one for each stage")


def _check_number(place: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _LARGEST:
        raise _refuse(place, value, "a number of at least 0")


def _check_positive(place: str, value: Any) -> None:
    _check_number(place, value)
    if value < 1:
        raise _refuse(place, value, "a number of at least 1")


def _check_whole(place: str, value: Any) -> None:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise _refuse(place, value, "a whole number of at least 0")


def _check_waves(place: str, value: Any) -> None:
    if value is not None:
        _check_whole(place, value)


def _check_flag(place: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise _refuse(place, value, "true or false")


def _check_text(place: str, value: Any) -> None:
    if not isinstance(value, str):
        raise _refuse(place, value, "text")
