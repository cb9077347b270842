"""Metrics of one pass of a recipe's step: those of its calls, and numbers of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hf_algorithms.recipes import StepError
from hf_protocols.metrics import merge_metrics
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_controller import MetricsFuture

__all__ = ["average_metrics", "describe_failures", "describe_skipped", "describe_unscorable", "has_skipped_all"]


def average_metrics(recipe: str, found: Sequence[MetricsFuture | Mapping[str, float]]) -> dict[str, float]:
    """Mean of every metric over what its calls counted, of a `_max` the largest; names sorted.

    An update with more tokens counts for more. A metric of which nothing was counted is left out.

    Args:
        recipe: name, for messages.
        found: what the step returned: metrics of calls, and numbers by name.

    Raises:
        StepError: for a number with the name of another metric: their mean would be neither.
    """
    own = [each for each in found if isinstance(each, Mapping)]
    parts = [each.sums() for each in found if not isinstance(each, Mapping)]
    taken: set[str] = set().union(*parts)
    for numbers in own:
        if double := sorted(taken & numbers.keys()):
            raise StepError(
                f"the step of {show(recipe)} returned a metric named {show(double[0])}, which another call reports. "
                "Rename it"
            )
        taken |= numbers.keys()
        parts.append({name: (value, 1.0) for name, value in numbers.items()})
    means = {name: value / count for name, (value, count) in merge_metrics(parts).items() if count}
    return dict(sorted(_explain_variance(means).items()))


def has_skipped_all(metrics: Mapping[str, float]) -> bool:
    """Returns True if updates of an iteration were skipped and none took a step, by the iteration's metrics.

    A mini-batch without anything to learn is skipped, while those of the other mini-batches step.
    """
    is_skipped, has_stepped = (any(name.endswith(end) for name in metrics) for end in ("/skipped_steps", "/grad_norm"))
    return is_skipped and not has_stepped


def describe_skipped(iteration: int, metrics: Mapping[str, float]) -> list[str]:
    """Returns a warning for each role of which `training.on_nonfinite = "skip"` left out updates of an iteration."""
    shares = {name.partition("/")[0]: share for name, share in metrics.items() if name.endswith("/skipped_nonfinite")}
    return [
        f"warning: in iteration {iteration} {share:.0%} of the updates of role {role} were left out: loss or gradient "
        "norm were not finite, or above training.explode_above"
        for role, share in shares.items()
        if share
    ]


def _explain_variance(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics with the explained variance of every critic in place of the moments that it is formed of."""
    from hf_algorithms.losses import VALUE_MOMENTS, compute_explained_variance

    roles = [name.removesuffix(f"/{VALUE_MOMENTS[0]}") for name in metrics if name.endswith(f"/{VALUE_MOMENTS[0]}")]
    for role in roles:
        found = compute_explained_variance({moment: metrics.pop(f"{role}/{moment}") for moment in VALUE_MOMENTS})
        if found is not None:
            metrics[f"{role}/explained_variance"] = found
    return metrics


def describe_unscorable(iteration: int, metrics: Mapping[str, float]) -> str:
    """A warning of an iteration in which no response has a score, with the functions whose calls were ended."""
    failed = [
        f"{name.split('/')[1]} ({count:g} responses)"
        for name, count in metrics.items()
        if name.startswith("reward/") and _is_failure(name, count)
    ]
    reason = "its functions returned None or NaN"
    if failed:
        reason = f"calls of {', '.join(failed)} met deadline_s or ended their process"
    return f"warning: in iteration {iteration} no response could be scored: {reason}"


def describe_failures(iteration: int, metrics: Mapping[str, float]) -> dict[str, str]:
    """Returns a warning for each function of which calls were ended, by the metric that counts them.

    Nothing where no response at all has a score: see `describe_unscorable`.
    """
    if "reward/mean" not in metrics:
        return {}
    return {
        name: f"warning: in iteration {iteration} {count:g} responses have no score by {name.split('/')[1]}, whose "
        f"calls met deadline_s or ended their process. Later ones are counted in {name} alone"
        for name, count in metrics.items()
        if _is_failure(name, count)
    }


def _is_failure(name: str, count: float) -> bool:
    return name.startswith(("reward/", "cost/")) and name.endswith("/failed") and count > 0
