"""Verifiers of mathematical answers: by number, and by the library math-verify."""

from __future__ import annotations

import logging
from fractions import Fraction
from functools import lru_cache
from typing import Any

from hf_algorithms.rewards._answer_checks import answers_checked_by
from hf_algorithms.rewards._numbers import find_final_number, read_answer
from hf_protocols.errors import ConfigError
from hf_protocols.validation import show

__all__ = ["math_verify", "number_match"]


def _check_number(answer: str) -> None:
    if read_answer(answer) is None:
        raise ValueError("it is not a number: math_verify compares expressions")


@answers_checked_by(_check_number, needs_answers=True)
def number_match(prompts: list[str], responses: list[str], answers: list[str | None]) -> list[float | None]:
    r"""1.0 for a response whose final number is the answer's, however it is written, else 0.0; None without an answer.

    The final number stands in the last `\boxed{}`, else behind the last `####`, else it is the last one of the text.

    Raises:
        ValueError: for an answer of the data without a number.
    """
    return [
        None if answer is None else float(find_final_number(response) == _number_of(answer))
        for response, answer in zip(responses, answers, strict=True)
    ]


def _check_expression(answer: str) -> None:
    if not _parse(answer):
        raise ValueError("math-verify finds no expression in it")


@answers_checked_by(_check_expression, needs_answers=True)
def math_verify(prompts: list[str], responses: list[str], answers: list[str | None]) -> list[float | None]:
    """1.0 for a response whose expression equals the answer's as math-verify compares them, else 0.0.

    It is None without an answer, and needs the extra `verify`. The library's own time limits are off: the deadline of
    the reward ends a call.

    Raises:
        ConfigError: without the library.
    """
    verify = _load_library().verify
    return [
        None
        if answer is None
        else float(verify(list(_parse(answer)), list(_parse(response, is_answer=False)), timeout_seconds=None))
        for response, answer in zip(responses, answers, strict=True)
    ]


@lru_cache(maxsize=4096)
def _parse(text: str, *, is_answer: bool = True) -> tuple[Any, ...]:
    library = _load_library()
    found = library.parse(text, parsing_timeout=None)
    if not found and is_answer:  # a bare answer such as x^2 is LaTeX without its dollars
        found = library.parse(f"${text}$", parsing_timeout=None)
    return tuple(found)


def _load_library() -> Any:
    try:
        import math_verify as library
    except ImportError as error:
        raise ConfigError('math-verify is not installed: pip install "hf-algorithms[verify]"') from error
    # it warns of the time limits that are off
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return library


def _number_of(answer: str) -> Fraction:
    """The answer's number: all of it or, as in GSM8K, the end of a solution.

    Raises:
        ValueError: without one.
    """
    number = read_answer(answer)
    if number is None:
        raise ValueError(f"the answer {show(answer)} of the data is not a number: math_verify compares expressions")
    return number
