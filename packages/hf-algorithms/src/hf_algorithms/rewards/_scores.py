"""Calling a reward function, which is somebody's own code, and believing nothing it says."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from hf_protocols.arguments import show
from hf_protocols.errors import RewardError

__all__ = ["RewardFunction", "compute_scores"]

RewardFunction = Callable[[list[str], list[str], list[str]], Sequence[float | None]]


def compute_scores(
    function: RewardFunction,
    prompts: Sequence[str],
    responses: Sequence[str],
    answers: Sequence[str],
    *,
    may_be_unscorable: bool = False,
) -> list[float]:
    """Calls `function` on one batch and checks that it answers one finite number per response.

    The function gets lists of its own. It may answer a list, a tuple, an array or a tensor; true counts as 1. With
    `may_be_unscorable` it may also answer None or NaN for a response that it cannot score, which is NaN here.

    Raises:
        RewardError: when the function raises, with the place in its own code; when its answer has another length;
            when a score is no number, NaN or infinite, with the sample it was given for.
    """
    try:
        scores = _as_list(function(list(prompts), list(responses), list(answers)))
    except (Exception, SystemExit) as error:  # whatever a user's function may raise is the user's to see
        raise RewardError(_describe_exception(function, error)) from error
    if scores is None or len(scores) != len(responses):
        given = "no list" if scores is None else f"{len(scores)} scores"
        raise RewardError(f"{_name(function)} answered {given} for {len(responses)} responses: one score per response")
    return [
        math.nan if may_be_unscorable and _is_unscorable(score) else _checked(score, index, sample, function)
        for index, (score, sample) in enumerate(zip(scores, zip(prompts, responses, answers, strict=True), strict=True))
    ]


def _as_list(answer: Any) -> list[Any] | None:
    if isinstance(answer, (str, bytes, Mapping)) or not hasattr(answer, "__iter__"):
        return None
    values = answer.tolist() if hasattr(answer, "tolist") else list(answer)
    if not isinstance(values, list):  # an array without dimensions
        return None
    return [value.item() if hasattr(value, "item") and value.ndim == 0 else value for value in values]


def _is_unscorable(score: Any) -> bool:
    return score is None or (isinstance(score, float) and math.isnan(score))


def _checked(score: Any, index: int, sample: tuple[str, str, str], function: RewardFunction) -> float:
    problem = None
    if not isinstance(score, Real):
        problem = f"{show(score)} ({type(score).__name__}), no number,"
    elif not _is_finite(score):
        problem = f"{show(score)}, not a finite number,"
    if problem is not None:
        prompt, response, answer = map(show, sample)
        raise RewardError(
            f"{_name(function)} answered {problem} for sample {index}: "
            f"prompt {prompt}, response {response}, answer {answer}"
        )
    return float(score)


def _is_finite(score: Real) -> bool:
    try:
        return math.isfinite(score)
    except OverflowError:  # an integer beyond the range of float
        return False


def _describe_exception(function: RewardFunction, error: BaseException) -> str:
    # The first frame is the call in this module; a function written in C has no frame of its own.
    frames = traceback.extract_tb(error.__traceback__)[1:]
    text = "".join(traceback.format_exception_only(error)).strip()
    if not frames:
        return f"{_name(function)} raised {text}"
    last = frames[-1]
    return f"{_name(function)} raised {text}\n  at {last.filename}:{last.lineno}, in {last.name}: {last.line}"


def _name(function: RewardFunction) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return f"the reward function {module}:{name}" if module and name else f"the reward function {show(function)}"
