"""Results of reward functions in every form that they may have, read as numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from numbers import Real
from typing import Any, NamedTuple

from hf_algorithms.rewards._result_numbers import WrongResult, as_scalar, is_date, read_number_or_none
from hf_algorithms.rewards._trainer import CallLog, as_json
from hf_protocols.validation import show

__all__ = ["CallScores", "read_result"]

_LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127


_ONE_EACH = "Return one for each response"


class CallScores(NamedTuple):
    """The numbers of one call.

    Attributes:
        scores: one for each response; NaN where it cannot be scored.
        metrics: further numbers by name, one for each response; NaN where a response has no number.
        log: values that the function logged, or returned next to its scores and are not numbers; None without any.
    """

    scores: list[float]
    metrics: dict[str, list[float]]
    log: CallLog | None = None


def read_result(result: Any, num_rows: int, *, per_sample: bool) -> CallScores:
    """Reads what a function returned for `num_rows` responses.

    For each response a number, None or NaN (it cannot be scored), or a mapping with `score`, whose other numbers are
    metrics, and whose other values are columns of the log. For a group a list, tuple, array or tensor of these; or a
    mapping with `rewards` or `scores`, whose `extra_logs` are metrics and columns.

    Args:
        result: of the call.
        num_rows: responses that the function was called with.
        per_sample: the function was called for one response and may return its number alone.

    Raises:
        WrongResult: for anything else, a wrong number of scores, and a score that float32 cannot hold.
    """
    if per_sample and type(result) is float and abs(result) <= _LARGEST_FLOAT32:  # most results, at once
        return CallScores([result], {})
    further = _Further(num_rows)
    if per_sample and (isinstance(result, Mapping) or _as_list(result) is None):
        result = [result]
    elif isinstance(result, Mapping):
        result = _open_mapping(result, further)
    values = _as_list(result)
    if values is None or len(values) != num_rows:
        given = f"{show(result)} ({_kind(result)}), which is not a list," if values is None else f"{len(values)} scores"
        raise WrongResult(f"returned {given} for {num_rows} responses", advice=_ONE_EACH)
    scores = []
    for row, value in enumerate(values):
        if isinstance(value, Mapping):
            if "score" not in value:
                raise WrongResult(f"returned {show(dict(value))}", row, advice="Name its number 'score'")
            for name, each in value.items():
                if name != "score":
                    further.add(str(name), row, each)
            value = as_scalar(value["score"])
        scores.append(_checked(value, row))
    return CallScores(scores, further.metrics, CallLog(columns=further.columns) if further.columns else None)


class _Further:
    """Values that a function returned next to its scores: numbers, which are metrics, and columns of all others."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.metrics: dict[str, list[float]] = {}
        self.columns: dict[str, list[Any]] = {}

    def add(self, name: str, row: int, value: Any) -> None:
        """Enters the value of a response; None, NaN and infinity are entered nowhere."""
        number = read_number_or_none(value)
        if number is None and value is not None:
            self.columns.setdefault(name, [None] * self.num_rows)[row] = as_json(value)
        elif number is not None and math.isfinite(number):
            self.metrics.setdefault(name, [math.nan] * self.num_rows)[row] = number


def _open_mapping(result: Mapping[Any, Any], further: _Further) -> Any:
    num_rows = further.num_rows
    key = next((name for name in ("rewards", "scores") if name in result), None)
    if key is None:
        given = f"returned a mapping of {show([*result])} for {num_rows} responses"
        raise WrongResult(given, advice="Name its list of scores 'rewards'")
    logs = result.get("extra_logs")
    found = dict(logs) if isinstance(logs, Mapping) else {}
    if key == "rewards" and "scores" in result:
        found["scores"] = result["scores"]
    for name, each in found.items():
        values = _as_list(each)
        if values is None:
            values = [each] * num_rows
        if len(values) != num_rows:
            given = f"returned {len(values)} numbers of {show(name)} for {num_rows} responses"
            raise WrongResult(given, advice=_ONE_EACH)
        for row, value in enumerate(values):
            further.add(str(name), row, value)
    return result[key]


def _as_list(answer: Any) -> list[Any] | None:
    # The order of a set is not that of the responses.
    if isinstance(answer, (str, bytes, Mapping, Set)) or not hasattr(answer, "__iter__"):
        return None
    if is_date(answer):
        return list(answer)
    values = answer.tolist() if hasattr(answer, "tolist") else list(answer)
    if not isinstance(values, list):  # an array without dimensions
        return None
    return [as_scalar(value) for value in values]


def _checked(value: Any, row: int) -> float:
    value = as_scalar(value)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return math.nan
    if not isinstance(value, Real):
        raise WrongResult(f"returned {show(value)} ({_kind(value)}), which is not a number,", row)
    if not _is_finite(value):
        raise WrongResult(f"returned {show(value)}, which is not a finite number,", row)
    if abs(float(value)) > _LARGEST_FLOAT32:
        raise WrongResult(f"returned {show(value)}, which is beyond the range of float32,", row)
    return float(value)


def _is_finite(score: Real) -> bool:
    try:
        return math.isfinite(score)
    except OverflowError:  # an integer beyond the range of float
        return False


def _kind(value: Any) -> str:
    return type(value).__name__
