"""Parts of a trainer that TRL's functions use: its state, and callables that log numbers and columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hf_algorithms.rewards._result_numbers import WrongResult, read_number_or_none

__all__ = ["TRAINER_VALUES", "CallLog", "TrainerState", "as_json"]

TRAINER_VALUES = ("trainer_state", "log_extra", "log_metric")
"""Parameters whose value is one for a whole call, in TRL's convention."""


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Progress of a run, by the names that transformers' `TrainerState` has. Other attributes are an error.

    Attributes:
        global_step: updates of the policy that are done.
        max_steps: updates of the whole run.
        epoch: passes over the training rows that are done, with its fraction.
        iteration: iterations that are done.
        is_local_process_zero: True, as functions are called for one worker.
        is_world_process_zero: True, in the same way.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    iteration: int = 0
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(each.name for each in fields(TrainerState))
        raise AttributeError(f"trainer_state has no attribute {name!r}: it has {known}")


@dataclass
class CallLog:
    """Logs of one call of a function.

    Attributes:
        numbers: sum and count of the values that `log_metric` was given, by name.
        columns: values that `log_extra` was given, by column.
    """

    numbers: dict[str, tuple[float, float]] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def log_metric(self, name: str, value: Any) -> None:
        """Adds a number to a mean. NaN adds nothing.

        Raises:
            TypeError: for something else than a number.
        """
        number = read_number_or_none(value)
        if number is None:
            raise TypeError(f"log_metric({name!r}, ...): the value {value!r:.80} is not a number")
        if math.isfinite(number):
            total, count = self.numbers.get(str(name), (0.0, 0.0))
            self.numbers[str(name)] = (total + number, count + 1.0)

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Adds values to a column, one for each response of the call in the end."""
        self.columns.setdefault(str(column), []).extend(map(as_json, values))

    @staticmethod
    def of(arguments: Mapping[str, Any]) -> CallLog | None:
        """Returns the log behind the keyword arguments of a call; None without one."""
        for name in TRAINER_VALUES[1:]:
            log = getattr(arguments.get(name), "__self__", None)
            if isinstance(log, CallLog):
                return log
        return None

    def check(self, num_rows: int) -> None:
        """Refuses columns that do not have one value for each response.

        Raises:
            WrongResult: naming the column.
        """
        for name, values in self.columns.items():
            if len(values) != num_rows:
                given = f"logged {len(values)} values in the column {name!r} for {num_rows} responses"
                raise WrongResult(given, advice="Log one for each response")


def as_json(value: Any) -> Any:
    """Returns a value as a file of samples holds it: texts, numbers and None as they are, others as texts.

    An unpaired surrogate, which no file holds, is written as its escape.
    """
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
    is_plain = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    if isinstance(value, str) or not is_plain:
        return str(value).encode(errors="backslashreplace").decode()
    return value
