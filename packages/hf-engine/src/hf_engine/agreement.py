"""Agreements of ranks before they communicate: a mistake of one rank is an error on all ranks, and all can continue.

After an agreement a group fails as a whole: if a rank fails inside a collective method, no other rank reports it. A
supervisor ends the other ranks: the controller on Ray, the launcher under torchrun (ADR 28).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist

from hf_engine.process_groups import local_device
from hf_protocols.errors import BackendError, HybridFlowError, ReshardError
from hf_protocols.foreign_code import Caught

__all__ = ["HIGHEST", "Agreement", "agree_on_moving", "spread", "together"]

HIGHEST = 2**31 - 1
"""Stands for a number if this rank refuses. Numbers are smaller, and are sent as 32 bits."""


@dataclass
class Agreement:
    """A rank's number in `together`, and whether all ranks had the same."""

    number: int = 0
    """Number that must be equal on all ranks; the block sets it, and it is sent as 31 bits."""
    is_alike: bool = False
    """All ranks had one number: known after the block."""


@contextmanager
def together(
    outcome: str,
    group: dist.ProcessGroup | None = None,
    *,
    error: type[HybridFlowError] = BackendError,
    device: torch.device | str | None = None,
    ranks: Sequence[int] | None = None,
) -> Iterator[Agreement]:
    """A block without collectives that either all ranks of a group complete or none. Collective at its end.

    Costs one reduction of eight bytes. Reasons are sent only if a rank has one.

    Args:
        outcome: of a mistake, for its message: `"nothing was loaded"`.
        group: the ranks that act together next; None is the default group.
        error: raised on the ranks that made no mistake.
        device: where the group communicates; None: this rank's own.
        ranks: names of the group's ranks in its order; None: their global ranks.

    Raises:
        HybridFlowError: on every rank, if the block failed on any: that rank's own error where it is one of ours, else
            `error` with the ranks and their reasons.
    """
    agreement = Agreement()
    with Caught() as caught:  # the other ranks wait for this one after any error
        yield agreement
    refusal = caught.error
    number = agreement.number % HIGHEST if refusal is None else HIGHEST
    lowest, highest = spread(number, number, group, local_device() if device is None else device)
    if highest == HIGHEST:
        _refuse(refusal, group, dist.get_process_group_ranks(group) if ranks is None else ranks, error, outcome)
    agreement.is_alike = lowest == highest


def spread(lowest: int, highest: int, group: dist.ProcessGroup | None, device: torch.device | str) -> tuple[int, int]:
    """Lowest and highest of all ranks' numbers, in one reduction of eight bytes. Collective."""
    if dist.get_world_size(group) == 1:
        return lowest, highest
    both = torch.tensor([-lowest, highest], dtype=torch.int32, device=device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    negated, highest = both.tolist()
    return -negated, highest


def agree_on_moving(
    moves: bool, group: dist.ProcessGroup | None, device: torch.device | str, *, whole: bool = True
) -> bool:
    """Refuses on every rank of the group a transfer that some take part in and others do not. Collective.

    Args:
        moves: whether this rank takes part.
        group: the ranks that would.
        device: where the group communicates.
        whole: this rank needs all weights in the transfer, not the adapters alone.

    Returns:
        True if any rank needs all of them.

    Raises:
        ReshardError: saying on which side this rank is.
    """
    lowest, highest = spread(moves, moves + (moves and whole), group, device)
    if not lowest and highest:
        raise ReshardError(
            f"the training weights of some ranks changed since the last transition, those of rank {dist.get_rank()} "
            f"{'did' if moves else 'did not'}. Call train_step and what loads weights on all ranks alike"
        )
    return highest > 1


def _refuse(
    refusal: BaseException | None,
    group: dist.ProcessGroup | None,
    ranks: Sequence[int],
    error: type[HybridFlowError],
    outcome: str,
) -> NoReturn:
    """Raises on every rank of a group that knows that one refused. Collective."""
    is_ours = isinstance(refusal, HybridFlowError)
    reason = None if refusal is None else str(refusal) if is_ours else f"{type(refusal).__name__}: {refusal}"
    told: list[str | None] = [None] * len(ranks)
    dist.all_gather_object(told, reason, group=group)
    if isinstance(refusal, HybridFlowError):
        raise refusal
    reasons: dict[str, int] = {}
    for rank, given in zip(ranks, told, strict=True):
        if given is not None:
            reasons.setdefault(given, rank)
    text = "; ".join(f"rank {rank} refused: {given}" for given, rank in reasons.items())
    raise error(f"{text}; {outcome}") from refusal
