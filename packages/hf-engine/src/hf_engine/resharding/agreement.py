"""What ranks agree on before weights move: the mistake of one is an error on all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist

from hf_protocols.errors import HybridFlowError, ReshardError

__all__ = ["HIGHEST", "agree", "agree_on_moving", "extremes", "refuse_together", "spread"]

HIGHEST = 2**31 - 1
"""In the place of a number: this rank refuses. Numbers are smaller, and go as 32 bits."""


def spread(lowest: int, highest: int, group: dist.ProcessGroup | None, device: torch.device | str) -> tuple[int, int]:
    """Lowest and highest of all ranks' numbers, in one reduction of eight bytes.

    Raises:
        ReshardError: if a rank died, or did not come within the group's deadline.
    """
    try:
        return extremes(lowest, highest, group, device)
    except RuntimeError as error:
        raise ReshardError(f"the transfer of weights failed on rank {dist.get_rank()}: {error}") from error


def extremes(lowest: int, highest: int, group: dist.ProcessGroup | None, device: torch.device | str) -> tuple[int, int]:
    """As `spread`; a lost rank is torch.distributed's error."""
    both = torch.tensor([-lowest, highest], dtype=torch.int32, device=device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    negated, highest = both.tolist()
    return -negated, highest


def agree(
    refusal: Exception | None,
    number: int,
    group: dist.ProcessGroup | None,
    device: torch.device | str,
    ranks: Sequence[int],
) -> bool:
    """Refuses on every rank of the group what any refuses; whether their numbers are equal. Collective.

    Args:
        refusal: what is wrong on this rank.
        number: that must be the same on all ranks, at least 0 and below `HIGHEST`.
        group: the ranks that act together next.
        device: where the group communicates.
        ranks: what the group's ranks are called, in its order.

    Raises:
        ReshardError: naming the ranks that refused, and why; a rank that did raises its own refusal.
    """
    lowest, highest = spread(number, number if refusal is None else HIGHEST, group, device)
    if highest < HIGHEST:
        return lowest == highest
    refuse_together(refusal, group, ranks, ReshardError, "the other ranks moved no weights")


def agree_on_moving(moves: bool, group: dist.ProcessGroup | None, device: torch.device | str) -> None:
    """Refuses on every rank of the group a transfer that some take part in and others do not. Collective.

    Args:
        moves: whether this rank takes part.
        group: the ranks that would.
        device: where the group communicates.

    Raises:
        ReshardError: saying on which side this rank is.
    """
    lowest, highest = spread(moves, moves, group, device)
    if lowest < highest:
        raise ReshardError(
            f"the training weights of some ranks changed since the last transition, those of rank {dist.get_rank()} "
            f"{'did' if moves else 'did not'}: call train_step and what loads weights on all ranks alike"
        )


def refuse_together(
    refusal: Exception | None,
    group: dist.ProcessGroup | None,
    ranks: Sequence[int],
    error: type[HybridFlowError],
    outcome: str,
) -> NoReturn:
    """Raises on every rank of a group that knows that one refused: its own refusal, or who else's. Collective."""
    reason = str(refusal) if isinstance(refusal, HybridFlowError) else f"{type(refusal).__name__}: {refusal}"
    told: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, None if refusal is None else reason, group=group)
    if refusal is not None:
        raise refusal
    refused = "; ".join(f"rank {rank} refused: {reason}" for rank, reason in zip(ranks, told, strict=True) if reason)
    raise error(f"{refused}; {outcome}")
