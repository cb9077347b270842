"""Reward functions that look at the answers of the data before a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

__all__ = ["SupportsAnswerCheck", "answers_checked_by"]

Function = TypeVar("Function", bound=Callable[..., Any])


@runtime_checkable
class SupportsAnswerCheck(Protocol):
    """A reward function that can check the answers of the data before a run."""

    def check_answer(self, answer: str) -> object:
        """Raises an exception, such as a ValueError with the reason, or returns False for an answer it cannot read."""
        ...


def answers_checked_by(
    check: Callable[[str], object], *, needs_answers: bool = False
) -> Callable[[Function], Function]:
    """Decorator of a reward function: `check` becomes its `check_answer`, see `SupportsAnswerCheck`.

    Args:
        check: called with each answer of the data, and with an empty text for a row without an answer.
        needs_answers: the function returns None where a row has no answer. Such rows are not checked, and data without
            any answer is refused.
    """

    def decorate(function: Function) -> Function:
        function.check_answer = check  # type: ignore[attr-defined]
        function.needs_answers = needs_answers  # type: ignore[attr-defined]
        return function

    return decorate
