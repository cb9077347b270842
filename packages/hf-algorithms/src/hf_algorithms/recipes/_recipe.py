"""What a recipe is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture, MetricsFuture
    from hf_engine import SamplingParams

__all__ = ["Recipe", "mini_batch_rows"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An algorithm: the roles it needs and the program of one iteration.

    ``step(roles, prompts, config, sampling)`` calls the roles and returns the futures of its metrics. What the mapper
    plans for is read off the step (``derive_dataflow``), where every metric is 0.0; a step may branch on metrics, not
    on batches.
    """

    name: str
    step: Callable[[Roles, BatchFuture, Any, SamplingParams], Sequence[MetricsFuture]]


def mini_batch_rows(num_rows: int, num_mini_batches: int, *, epochs: int, seed: int) -> Iterator[list[int]]:
    """Global seeded row sets: every row once an epoch, whatever the number of ranks.

    Yields ``epochs * num_mini_batches`` lists whose sizes differ by at most one.
    """
    order = random.Random(seed)
    for _ in range(epochs):
        rows = list(range(num_rows))
        order.shuffle(rows)
        for part in range(num_mini_batches):
            yield sorted(rows[part::num_mini_batches])
