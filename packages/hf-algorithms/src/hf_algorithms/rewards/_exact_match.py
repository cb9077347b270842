"""The simplest verifiable reward."""

from __future__ import annotations

from hf_algorithms.rewards._answer_checks import answers_checked_by

__all__ = ["exact_match"]


def _check_answer(answer: str) -> None:
    """Any text is an answer."""


@answers_checked_by(_check_answer, needs_answers=True)
def exact_match(prompts: list[str], responses: list[str], answers: list[str | None]) -> list[float | None]:
    """Returns 1.0 if response and answer are equal after stripping white space, else 0.0; None without an answer."""
    return [
        None if answer is None else float(response.strip() == answer.strip())
        for response, answer in zip(responses, answers, strict=True)
    ]
