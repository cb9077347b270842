"""Rewards for grade-school word problems, whose solutions end in a line ``#### 72``."""

from __future__ import annotations

import re
from decimal import Decimal

from hf_algorithms.rewards._check import answers_checked_by
from hf_protocols.arguments import show

__all__ = ["gsm8k_accuracy", "gsm8k_reward"]

_NUMBER = r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
# A solution writes dollars as "#### 18" but a model may write "#### $18"; both mean 18.
_FINAL = re.compile(rf"####\s*\$?\s*({_NUMBER})")
_AT_THE_END = re.compile(r"\.?\s*")

_RIGHT = 1.0
_ENDS_WITH_NUMBER = 0.2
_HAS_NUMBER = 0.1


def _check_answer(answer: str) -> None:
    if _number_of(answer) is None:
        raise ValueError("it has no number, neither alone nor after ####")


@answers_checked_by(_check_answer)
def gsm8k_reward(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
    """1.0 for the right final number; for a wrong one, a little for the form.

    The final number is the one after the last ``####`` that has one. A wrong one earns 0.2 at the end of the
    response and 0.1 with more text behind it; a response without any earns 0.

    Raises:
        ValueError: for an answer of the data without a number.
    """
    return [_score(response, _final_answer(answer)) for response, answer in zip(responses, answers, strict=True)]


@answers_checked_by(_check_answer)
def gsm8k_accuracy(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
    """1.0 for the right final number, read as :func:`gsm8k_reward` reads it, else 0.0.

    Raises:
        ValueError: for an answer of the data without a number.
    """
    return [float(score == _RIGHT) for score in gsm8k_reward(prompts, responses, answers)]


def _score(response: str, answer: Decimal) -> float:
    match = _last_match(response)
    if match is None:
        return 0.0
    if _value(match[1]) == answer:
        return _RIGHT
    return _ENDS_WITH_NUMBER if _AT_THE_END.fullmatch(response, match.end()) else _HAS_NUMBER


def _final_answer(answer: str) -> Decimal:
    number = _number_of(answer)
    if number is None:
        raise ValueError(f"the answer {show(answer)} of the data has no number, neither alone nor after ####")
    return _value(number)


def _number_of(answer: str) -> str | None:
    """The number after ``####``, or the whole answer where it is nothing but a number."""
    match = _last_match(answer) or re.fullmatch(rf"\s*\$?\s*({_NUMBER})\s*", answer)
    return None if match is None else match[1]


def _last_match(text: str) -> re.Match[str] | None:
    last = None
    for match in _FINAL.finditer(text):
        last = match
    return last


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))
