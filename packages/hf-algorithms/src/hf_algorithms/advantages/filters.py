"""Dynamic sampling: which groups of responses have something to learn from. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hf_algorithms.advantages._columns import split_groups
from hf_protocols.errors import BatchError
from hf_protocols.validation import show

__all__ = ["RESPONSE_TOKENS", "FilterMetric", "has_zero_variance", "select_groups"]

RESPONSE_TOKENS = "response_tokens"
"""Name of the metric that counts a response's trained tokens."""


@dataclass(frozen=True)
class FilterMetric:
    """The number of each response by which dynamic sampling compares a group.

    Attributes:
        name: a column with one number a row, or `response_tokens`.
    """

    name: str

    @property
    def reads(self) -> tuple[str, ...]:
        """The column that it needs."""
        return ("response_mask",) if self.name == RESPONSE_TOKENS else (self.name,)

    def __call__(self, columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the numbers, float64 [B].

        Args:
            columns: the one of `reads`; `response_mask` padded [B, T].

        Raises:
            BatchError: if the column has more than one number a row.
        """
        if self.name == RESPONSE_TOKENS:
            return columns["response_mask"].bool().sum(1).double()
        column = columns[self.name]
        if column.dim() != 1:
            raise BatchError(
                f"algorithm.filter_metric={show(self.name)}: the column has several numbers a response, and groups are "
                "compared by one. Name a column such as 'scores'"
            )
        return column.double()


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
