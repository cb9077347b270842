"""Advantages of on-policy distillation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_algorithms.advantages._columns import read_columns

__all__ = ["TeacherAdvantage"]


@dataclass(frozen=True, kw_only=True)
class TeacherAdvantage:
    """The teacher's log-prob less the student's, of every sampled token.

    It is a sample of the reverse KL(student || teacher) with its sign turned (Agarwal et al. 2024, section 3). A token
    answers for itself alone: nothing is accumulated, and no baseline is subtracted.
    """

    reads: ClassVar[tuple[str, ...]] = ("response_mask", "old_logprobs", "teacher_logprobs")
    writes: ClassVar[tuple[str, ...]] = ("advantages",)

    def __call__(self, columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns `advantages` [B, T], 0 where the mask is False.

        Args:
            columns: what `reads` names, [B, T] each.

        Raises:
            BatchError: a column is missing or does not fit.
        """
        given = read_columns(columns, self.reads, "TeacherAdvantage")
        mask = given["response_mask"]
        return {"advantages": (given["teacher_logprobs"] - given["old_logprobs"]).masked_fill(~mask, 0.0)}
