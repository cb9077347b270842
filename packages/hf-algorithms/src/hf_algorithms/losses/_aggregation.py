"""Aggregation of token losses to one number: weights of the tokens, and this rank's share of the denominator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from hf_algorithms.advantages.shaping import TRUNCATED
from hf_algorithms.jagged import pad_rows
from hf_protocols import BatchError, ConfigError
from hf_protocols.validation import Checks, show

__all__ = ["Aggregation", "AggregationMode", "count_group_tokens"]

_check = Checks(ConfigError)

AggregationMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant", "prompt-mean"]


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """Reduces token losses over a whole optimizer-step batch, however its rows are split.

    The loss is sum(weights * token losses) / sum(counts), both sums over all micro-batches and ranks. With l a token
    loss, M the mask of trained tokens, L_i the trained tokens of row i, and B the rows:

    - `token-mean`: sum l M / sum M (DAPO's code, verl, TRL).
    - `seq-mean-token-mean`: mean over rows of sum_t l M / L_i (GRPO, Shao et al. 2024, eq. 3).
    - `seq-mean-token-sum`: mean over rows of sum_t l M (policy gradient of whole sequences).
    - `constant`: sum l M / (B * constant) (Dr.GRPO, Liu et al. 2025; its constant is the largest response length).
    - `prompt-mean`: mean over groups of sum l M / trained tokens of the group (DAPO, Yu et al. 2025, eq. 8 as printed).

    Rows without a trained token do not count in the two sequence means and in `prompt-mean`. They count in `constant`,
    whose denominator depends on no mask.

    `prompt-mean` reads `group_tokens` (see `count_group_tokens`). A batch that holds a part of a group counts that part
    of its tokens.

    Raises:
        ConfigError: for an unknown mode, or a `constant` that is missing or has no use.
    """

    mode: AggregationMode = "token-mean"
    constant: float | None = None
    """Tokens by which `constant` divides each row's sum."""
    overlong_filter: bool = False
    """Trains no token of a response that was cut by its length (DAPO's overlong filtering).

    Reads `finish_reason` [B], 1 for these. The rows keep their place in advantages and group statistics. They are rows
    without a trained token here, so `constant` alone counts them. `group_tokens` must then be counted without them.
    """

    def __post_init__(self) -> None:
        _check.one_of("aggregation", self.mode, get_args(AggregationMode))
        if self.mode == "constant":
            _check.number("loss_denominator", self.constant)
        elif self.constant is not None:
            raise ConfigError(
                f"loss_denominator={show(self.constant)}: aggregation={show(self.mode)} divides by no constant. "
                "Remove it, or use aggregation='constant'"
            )

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that a batch must have."""
        by_group = ("group_tokens",) if self.mode == "prompt-mean" else ()
        return ("response_mask", *by_group, *(("finish_reason",) if self.overlong_filter else ()))

    def select(self, columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the trained tokens, bool [b, T]: `response_mask` without the rows that `overlong_filter` drops."""
        mask = pad_rows(columns["response_mask"]).bool()
        if not self.overlong_filter:
            return mask
        return mask & (columns["finish_reason"] != TRUNCATED)[:, None]

    def weigh(self, mask: torch.Tensor, micro_batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the weights of the token losses, float64 [b, T], 0 where the mask is False.

        Args:
            mask: bool [b, T], from `select`.
            micro_batch: has `group_tokens` [b] for `prompt-mean`.
        """
        tokens = mask.sum(1).double()
        per_row = torch.ones_like(tokens)
        if self.mode == "seq-mean-token-mean":
            per_row = 1 / tokens.clamp(min=1)
        elif self.mode == "prompt-mean":
            per_row = 1 / torch.where(tokens > 0, micro_batch["group_tokens"].double(), 1.0)
        return per_row[:, None] * mask

    def count(self, columns: Mapping[str, torch.Tensor]) -> float:
        """Returns these rows' share of the denominator; the shares of disjoint rows add up.

        Args:
            columns: those of `reads`; `response_mask` padded or jagged [b, T].

        Raises:
            BatchError: if a row has more trained tokens than its `group_tokens`.
        """
        mask = self.select(columns)
        tokens = mask.sum(1).double()
        if self.mode == "token-mean":
            return float(tokens.sum())
        if self.mode == "constant":
            assert self.constant is not None
            return len(mask) * float(self.constant)
        if self.mode != "prompt-mean":
            return float((tokens > 0).sum())
        of_group = columns["group_tokens"].double()
        if not bool((of_group >= tokens).all()):
            row = int((~(of_group >= tokens)).nonzero()[0])
            raise BatchError(
                f"group_tokens[{row}]={float(of_group[row])}: is below the row's {int(tokens[row])} trained tokens. "
                "Count the trained tokens of all rows of its group"
            )
        return float((tokens / torch.where(tokens > 0, of_group, 1.0)).sum())


def count_group_tokens(mask: torch.Tensor, group_id: torch.Tensor) -> torch.Tensor:
    """Returns the trained tokens of each row's whole group, float64 [B].

    Args:
        mask: bool [B, T], trained tokens of all rows of every group.
        group_id: int64 [B], equal for rows of one group, in any order.
    """
    groups, index = torch.unique(group_id, return_inverse=True)
    tokens = mask.bool().sum(1).double()
    return tokens.new_zeros(len(groups)).index_add_(0, index, tokens)[index]
