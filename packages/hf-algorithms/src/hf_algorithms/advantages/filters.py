"""Dynamic sampling: which groups of responses have something to learn from. Pure."""

from __future__ import annotations

import torch

from hf_algorithms.advantages._columns import split_groups

__all__ = ["has_zero_variance", "select_groups"]


def has_zero_variance(values: torch.Tensor) -> bool:
    """True if the scored (not NaN) entries of [n] are all equal, or fewer than two.

    Compares the largest with the smallest: a computed variance of equal floats may differ from 0 by rounding.
    """
    scored = values[~values.isnan()]
    return len(scored) < 2 or bool(scored.max() == scored.min())


def select_groups(metric: torch.Tensor, group_id: torch.Tensor) -> torch.Tensor:
    """Returns the ids of the groups to keep, int64 [K], ascending: those whose metric differs within the group.

    DAPO (Yu et al. 2025, section 3.2) keeps prompts that are neither always solved nor never. Groups are kept or
    dropped whole: a kept group keeps its rows without a score. A group with fewer than two scored rows is dropped.

    Args:
        metric: [B], the `filter_metric` of each response, NaN where it is not known.
        group_id: int64 [B].
    """
    kept = [group_id[rows[0]] for rows in split_groups(group_id) if not has_zero_variance(metric[rows])]
    return torch.stack(kept) if kept else group_id.new_empty(0)
