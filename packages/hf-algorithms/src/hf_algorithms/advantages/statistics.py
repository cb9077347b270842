"""Metrics of scores and their groups, for the advantage worker. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hf_algorithms.advantages._columns import split_groups
from hf_algorithms.advantages.filters import has_zero_variance

__all__ = ["compute_score_metrics"]


def compute_score_metrics(columns: Mapping[str, torch.Tensor]) -> dict[str, tuple[float, float]]:
    """Returns metrics of one batch as `{name: (sum, count)}`.

    `reward/mean` and `reward/std` (dividing by N - 1; 0 for one row) are over scored rows of the whole batch; left out
    where no row is scored. `reward/unscorable` is the number of rows without a score, `reward/unscorable_baseline` the
    number of rows whose greedy baseline has no score. `group/zero_variance` is the share of groups whose scores are all
    equal, among groups with at least two scored rows; left out if no group has two.

    Args:
        columns: `scores` [B], NaN where the reward could not score; `group_id` int64 [B] and `baseline_scores` [B],
            which may be absent.
    """
    scores = columns["scores"].double()
    scored = scores[~scores.isnan()]
    metrics = {"reward/unscorable": (float(len(scores) - len(scored)), 1.0)}
    if len(scored):
        metrics["reward/mean"] = (float(scored.sum()), float(len(scored)))
        metrics["reward/std"] = (float(scored.std()) if len(scored) > 1 else 0.0, 1.0)
    if "baseline_scores" in columns:
        metrics["reward/unscorable_baseline"] = (float(columns["baseline_scores"].isnan().sum()), 1.0)
    if "group_id" in columns:
        groups = [scores[rows] for rows in split_groups(columns["group_id"]) if len(rows) > 1]
        compared = [group for group in groups if (~group.isnan()).sum() > 1]
        if compared:
            metrics["group/zero_variance"] = (float(sum(map(has_zero_variance, compared))), float(len(compared)))
    return metrics
