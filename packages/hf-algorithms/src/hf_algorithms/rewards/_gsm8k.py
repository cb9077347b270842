"""Rewards for grade-school word problems, whose solutions end in a line `#### 72`."""

from __future__ import annotations

import re
from fractions import Fraction

from hf_algorithms.rewards._answer_checks import answers_checked_by
from hf_algorithms.rewards._numbers import find_numbers, plain_text, read_number
from hf_protocols.validation import show

__all__ = ["gsm8k_accuracy", "gsm8k_reward"]

_MARK = "####"
_AT_THE_END = re.compile(r"\.?\s*")

_RIGHT = 1.0
_ENDS_WITH_NUMBER = 0.2
_HAS_NUMBER = 0.1


def _check_answer(answer: str) -> None:
    if _number_of(answer) is None:
        raise ValueError("it has no number, neither alone nor after ####")


@answers_checked_by(_check_answer, needs_answers=True)
def gsm8k_reward(prompts: list[str], responses: list[str], answers: list[str | None]) -> list[float | None]:
    """1.0 for the right final number; for a wrong one, a little for the form; None without an answer.

    The final number is the one after the last `####` that has one. A wrong one earns 0.2 at the end of the
    response and 0.1 with more text behind it; a response without any earns 0.

    Raises:
        ValueError: for an answer of the data without a number.
    """
    return [
        None if answer is None else _score(response, _final_answer(answer))
        for response, answer in zip(responses, answers, strict=True)
    ]


@answers_checked_by(_check_answer, needs_answers=True)
def gsm8k_accuracy(prompts: list[str], responses: list[str], answers: list[str | None]) -> list[float | None]:
    """1.0 for the right final number, read as `gsm8k_reward` reads it, else 0.0; None without an answer.

    Raises:
        ValueError: for an answer of the data without a number.
    """
    scores = gsm8k_reward(prompts, responses, answers)
    return [None if score is None else float(score == _RIGHT) for score in scores]


def _score(response: str, answer: Fraction) -> float:
    found = _find_final(response)
    if found is None:
        return 0.0
    number, behind = found
    if number == answer:
        return _RIGHT
    return _ENDS_WITH_NUMBER if _AT_THE_END.fullmatch(behind) else _HAS_NUMBER


def _final_answer(answer: str) -> Fraction:
    number = _number_of(answer)
    if number is None:
        raise ValueError(f"the answer {show(answer)} of the data has no number, neither alone nor after ####")
    return number


def _number_of(answer: str) -> Fraction | None:
    """The number after `####`, or the whole answer where it is nothing but a number and its unit."""
    found = _find_final(answer)
    return read_number(answer) if found is None else found[0]


def _find_final(text: str) -> tuple[Fraction, str] | None:
    """The number behind the last `####` that has one, and the text behind it."""
    end = len(text)
    while (start := text.rfind(_MARK, 0, end)) >= 0:
        plain = plain_text(text[start + len(_MARK) :]).lstrip()
        number = next(find_numbers(plain), None)
        if number is not None and number.start == 0:
            return number.value, plain[number.end :]
        end = start
    return None
