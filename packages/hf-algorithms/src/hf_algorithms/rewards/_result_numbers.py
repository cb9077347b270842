"""Numbers in the results of reward functions, and the error of a result that is not one."""

from __future__ import annotations

from functools import partial
from numbers import Real
from typing import Any

__all__ = ["WrongResult", "as_scalar", "is_date", "read_number_or_none"]

_ADVICE = "Return a number, or None for a response that it does not apply to"


class WrongResult(Exception):  # noqa: N818 - it never leaves the package
    """A function returned something else than scores.

    Attributes:
        problem: what it did, which begins with a verb.
        row: of the call; None for the whole.
        advice: what to do.
    """

    def __init__(self, problem: str, row: int | None = None, *, advice: str = _ADVICE) -> None:
        super().__init__(problem, row)
        self.problem = problem
        self.row = row
        self.advice = advice

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(WrongResult, advice=self.advice), (self.problem, self.row)


def as_scalar(value: Any) -> Any:
    """Returns the number of an array or tensor without dimensions; anything else as it is."""
    is_array = hasattr(value, "item") and getattr(value, "ndim", 1) == 0 and not is_date(value)
    return value.item() if is_array else value


def is_date(value: Any) -> bool:
    """True for numpy's dates: a missing one would become None, which means something else here."""
    return getattr(getattr(value, "dtype", None), "kind", "") in ("M", "m")


def read_number_or_none(value: Any) -> float | None:
    """Returns a number, array or tensor of one number as a float; None for anything else, and beyond a float's range.

    NaN and infinity are numbers.
    """
    value = as_scalar(value)
    try:
        return float(value) if isinstance(value, Real) else None
    except OverflowError:
        return None
