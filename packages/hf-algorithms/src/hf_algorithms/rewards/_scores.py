"""Calling a reward function, which is somebody's own code, and believing nothing it says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from numbers import Real
from typing import Any

from hf_algorithms.users_code import describe_raised
from hf_controller import Terminated
from hf_protocols.arguments import show
from hf_protocols.errors import RewardError

__all__ = ["RewardFunction", "compute_scores"]

_LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127

RewardFunction = Callable[[list[str], list[str], list[str]], Sequence[float | None]]


def compute_scores(
    function: RewardFunction,
    prompts: Sequence[str],
    responses: Sequence[str],
    answers: Sequence[str],
    *,
    samples: Sequence[Sequence[int]] | None = None,
    may_be_unscorable: bool = False,
    kind: str = "reward",
) -> list[float]:
    """Calls `function` on one batch and checks that it answers one number of float32's range per response.

    The function gets lists of its own. It may answer a list, a tuple, an array or a tensor; true counts as 1. With
    `may_be_unscorable` it may also answer None or NaN for a response that it cannot score, which is NaN here.

    Args:
        function: is called with the texts.
        prompts: one for each response.
        responses: texts.
        answers: one for each response.
        samples: `sample_id` of each response, for messages: epoch, row, number in its group, attempt.
        may_be_unscorable: None and NaN are taken.
        kind: stands in messages before "function".

    Raises:
        RewardError: when the function raises, with the place in its own code; when its answer has another length;
            when a score is not a number, NaN, infinite or beyond float32, with the sample it was given for.
    """
    name = _name(function, kind)
    try:
        scores = _as_list(function(list(prompts), list(responses), list(answers)))
    except Terminated:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's function may raise is the user's to see
        raise RewardError(f"{name} raised {describe_raised(error)}") from error
    if scores is None or len(scores) != len(responses):
        given = "something else than a list" if scores is None else f"{len(scores)} scores"
        raise RewardError(f"{name} answered {given} for {len(responses)} responses: one score per response")
    found = []
    for index, (score, texts) in enumerate(zip(scores, zip(prompts, responses, answers, strict=True), strict=True)):
        which = f"sample {index}" if samples is None else _name_sample(samples[index])
        is_unscorable = may_be_unscorable and _is_unscorable(score)
        found.append(math.nan if is_unscorable else _checked(score, which, texts, name))
    return found


def _name_sample(sample_id: Sequence[int]) -> str:
    epoch, row, number, attempt = sample_id
    again = f", attempt {attempt}" if attempt else ""
    return f"response {number} to row {row} (epoch {epoch}{again})"


def _as_list(answer: Any) -> list[Any] | None:
    # The order of a set is not that of the responses.
    if isinstance(answer, (str, bytes, Mapping, Set)) or not hasattr(answer, "__iter__"):
        return None
    if getattr(getattr(answer, "dtype", None), "kind", "") in ("M", "m"):  # a missing date would become None
        return list(answer)
    values = answer.tolist() if hasattr(answer, "tolist") else list(answer)
    if not isinstance(values, list):  # an array without dimensions
        return None
    return [value.item() if hasattr(value, "item") and value.ndim == 0 else value for value in values]


def _is_unscorable(score: Any) -> bool:
    return score is None or (isinstance(score, float) and math.isnan(score))


def _checked(score: Any, which: str, texts: tuple[str, str, str], name: str) -> float:
    problem = None
    if not isinstance(score, Real):
        problem = f"{show(score)} ({type(score).__name__}), which is not a number,"
    elif not _is_finite(score):
        problem = f"{show(score)}, not a finite number,"
    elif abs(float(score)) > _LARGEST_FLOAT32:
        problem = f"{show(score)}, a number beyond the range of float32,"
    if problem is not None:
        prompt, response, answer = map(show, texts)
        raise RewardError(
            f"{name} answered {problem} for {which}: prompt {prompt}, response {response}, answer {answer}"
        )
    return float(score)


def _is_finite(score: Real) -> bool:
    try:
        return math.isfinite(score)
    except OverflowError:  # an integer beyond the range of float
        return False


def _name(function: RewardFunction, kind: str) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return f"the {kind} function {module}:{name}" if module and name else f"the {kind} function {show(function)}"
