"""Losses and estimators, which may be a user's own, checked where the call is made or traced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import getattr_static
from typing import TYPE_CHECKING, Any

from hf_protocols import ConfigError
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_controller import TracedCall, Worker

__all__ = ["MODEL_OUTPUTS", "check_call_arguments", "read_outputs"]

MODEL_OUTPUTS = {"lm": ("logprobs", "entropy", "candidate_logprobs"), "value": ("values",), "score": ("scores",)}
"""Outputs of a model, by its head."""


def read_outputs(loss: object, head: str) -> tuple[str, ...]:
    """Returns the outputs that a loss needs: its attribute `outputs`, or the first that the head has.

    Raises:
        ConfigError: for something else than a tuple of names, a name that the head lacks, or candidates of which the
            loss does not read the ids.
    """
    known = MODEL_OUTPUTS[head]
    given: Any = getattr(loss, "outputs", known[:1])
    what = f"{type(loss).__name__}.outputs={show(given)}"
    if not isinstance(given, tuple | list) or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"{what}: is not a tuple of names. Name some of {', '.join(known)}")
    if strangers := [name for name in given if name not in known]:
        raise ConfigError(
            f"{what}: a model with the head {show(head)} has {', '.join(known)}, not {show(strangers[0])}. "
            "Name some of these"
        )
    if "candidate_logprobs" in given and "candidate_ids" not in getattr(loss, "reads", ()):
        raise ConfigError(
            f"{what}: candidate_logprobs are of the tokens in the column candidate_ids. Name it in `reads` as well"
        )
    return tuple(given)


def check_call_arguments(calls: Iterable[TracedCall], workers: Mapping[str, type[Worker]]) -> None:
    """Checks the losses and estimators of traced calls; see `read_outputs` and `check_estimator`.

    Args:
        calls: whose arguments are looked at.
        workers: classes by role; one without a `head` has outputs of its own, which are not checked.

    Raises:
        ConfigError: for outputs that the model lacks, or an object that is not an estimator, with the call.
    """
    from hf_algorithms.advantages import check_estimator
    from hf_algorithms.workers.advantage import AdvantageWorker

    for call in calls:
        worker = workers.get(call.role, object)
        head = getattr(worker, "head", "")
        takes_estimator = issubclass(worker, AdvantageWorker) and call.method == "compute_advantages"
        try:
            for value in call.arguments:
                if head in MODEL_OUTPUTS and getattr_static(value, "outputs", None) is not None:
                    read_outputs(value, head)
                elif takes_estimator:
                    check_estimator(value)
        except ConfigError as error:
            raise ConfigError(f"{call.role}.{call.method}: {error}") from None
