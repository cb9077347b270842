"""What ranks agree on before weights move: the mistake of one is an error on all of them at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from hf_engine.lost_peers import describe_failure
from hf_engine.process_groups import rank_in
from hf_protocols.errors import HybridFlowError, ReshardError

__all__ = [
    "HIGHEST",
    "agree",
    "agree_on_moving",
    "ends_with_lost_peers",
    "extremes",
    "refusals_of",
    "refuse_together",
    "relayed",
    "spread",
]

E = TypeVar("E", bound=HybridFlowError)

HIGHEST = 2**31 - 1
"""In the place of a number: this rank refuses. Numbers are smaller, and go as 32 bits."""
_RELAYED = "_hf_engine_relayed"
"""Attribute of an error: what `relayed` was given."""


def spread(
    lowest: int,
    highest: int,
    group: dist.ProcessGroup | None,
    device: torch.device | str,
    *,
    rank: int | None = None,
) -> tuple[int, int]:
    """Lowest and highest of all ranks' numbers, in one reduction of eight bytes.

    Raises:
        ReshardError: if a rank died, or did not come within the group's deadline; it calls this one `rank`, or by its
            global rank.
    """
    with ends_with_lost_peers(group, rank):
        return extremes(lowest, highest, group, device)


@contextmanager
def ends_with_lost_peers(group: dist.ProcessGroup | None, rank: int | None = None) -> Iterator[None]:
    """Collectives in which this rank says that it lost another one.

    Raises:
        ReshardError: in place of torch.distributed's error.
    """
    try:
        yield
    except RuntimeError as error:
        raise ReshardError(describe_failure("the transfer of weights", error, rank=rank, group=group)) from error


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
    rank = ranks[rank_in(group)]
    lowest, highest = spread(number, number if refusal is None else HIGHEST, group, device, rank=rank)
    if highest < HIGHEST:
        return lowest == highest
    refuse_together(refusal, group, ranks, ReshardError, "the other ranks moved no weights")


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
            f"{'did' if moves else 'did not'}: call train_step and what loads weights on all ranks alike"
        )
    return highest > 1


def refuse_together(
    refusal: Exception | None,
    group: dist.ProcessGroup | None,
    ranks: Sequence[int],
    error: type[HybridFlowError],
    outcome: str,
) -> NoReturn:
    """Raises on every rank of a group that knows that one refused: its own refusal, or who else's. Collective.

    What a rank tells of others it was told itself, and is not counted as its own; see `relayed`.
    """
    reason: str | None = None
    known: Mapping[int, str] = {}
    rank = ranks[rank_in(group)]
    if refusal is not None:
        reason = str(refusal) if isinstance(refusal, HybridFlowError) else f"{type(refusal).__name__}: {refusal}"
        known = refusals_of(refusal, rank, reason)
    told: list[tuple[str | None, Mapping[int, str]]] = [(None, {})] * dist.get_world_size(group)
    with ends_with_lost_peers(group, rank):
        dist.all_gather_object(told, (reason, known), group=group)
    refused = {rank: each[rank] for _, each in told for rank in each}
    if refusal is not None and (known or not refused):
        raise refusal
    refused = refused or {rank: reason for rank, (reason, _) in zip(ranks, told, strict=True) if reason is not None}
    text = "; ".join(f"rank {rank} refused: {refused[rank]}" for rank in sorted(refused))
    raise relayed(error(f"{text}; {outcome}"), refused) from refusal


def relayed(error: E, refusals: Mapping[int, str]) -> E:
    """The error, marked as one of what other ranks refused: where it is told again it stays theirs.

    Args:
        error: what this rank raises.
        refusals: by rank, why it refused; empty where this rank only knows that something is wrong elsewhere.
    """
    vars(error)[_RELAYED] = dict(refusals)
    return error


def refusals_of(error: Exception, rank: int, reason: str) -> Mapping[int, str]:
    """By rank, what an error tells: of this one the reason, unless it was relayed."""
    found: Mapping[int, str] = vars(error).get(_RELAYED, {rank: reason})
    return found
