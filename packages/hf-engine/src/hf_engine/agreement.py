"""Agreements of ranks before they communicate: a mistake of one rank is an error on all ranks, and all can continue.

After an agreement a group fails as a whole: if a rank fails inside a collective method, no other rank reports it. A
supervisor ends the other ranks: the controller on Ray, the launcher under torchrun (ADR 28).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn
from zlib import crc32

import torch
import torch.distributed as dist

from hf_engine.process_groups import local_device
from hf_protocols.errors import BackendError, HybridFlowError
from hf_protocols.foreign_code import Caught
from hf_protocols.validation import Checks

__all__ = ["HIGHEST", "Agreement", "check_version", "spread", "together"]

HIGHEST = 2**31 - 1
"""Stands for a number if this rank refuses. Numbers are smaller, and are sent as 32 bits."""

_PACKAGE = "hf_engine."


@dataclass
class Agreement:
    """A rank's numbers in `together`, and what is known of all ranks after the block."""

    number: int = 0
    """Number that must be equal on all ranks; the block sets it, and it is sent as 31 bits."""
    is_alike: bool = False
    """All ranks had one number: known after the block."""
    lowest: int = HIGHEST
    """A second number below `HIGHEST`, which may differ. The block sets both fields to this rank's own, or leaves them
    if it does not have one; afterwards this is the lowest of all ranks."""
    highest: int = -1
    """The highest of these."""


@contextmanager
def together(
    outcome: str,
    group: dist.ProcessGroup | None = None,
    *,
    error: type[HybridFlowError] = BackendError,
    device: torch.device | str | None = None,
    ranks: Sequence[int] | None = None,
    same_method: bool = False,
) -> Iterator[Agreement]:
    """A block without collectives that either all ranks of a group complete or none. Collective at its end.

    Costs one reduction of 24 bytes. Reasons are sent only if a rank has one.

    Args:
        outcome: of a mistake, for its message: `"nothing was loaded"`. Ranks that were given different ones are in
            different methods.
        group: the ranks that act together next; None is the default group.
        error: raised on the ranks that made no mistake.
        device: where the group communicates; None: see `local_device`.
        ranks: names of the group's ranks in its order; None: their global ranks.
        same_method: the program calls one method of this package on all ranks; else the same outcome is enough.

    Raises:
        HybridFlowError: on every rank, if the block failed on any: that rank's own error where it is one of ours, else
            `error` with the ranks and their reasons. Also on every rank if they are in different methods.
    """
    agreement = Agreement()
    with Caught() as caught:  # the other ranks wait for this one after any error
        yield agreement
    refusal = caught.error
    number = agreement.number % HIGHEST if refusal is None else HIGHEST
    place = crc32(f"{outcome}{_find_method() if same_method else ''}".encode()) % HIGHEST
    pairs = [(number, number), (agreement.lowest, agreement.highest), (place, place)]
    found = spread(pairs, group, local_device(group) if device is None else device)
    (lowest, highest), (agreement.lowest, agreement.highest), (first_place, last_place) = found
    if highest == HIGHEST or first_place != last_place:
        members = dist.get_process_group_ranks(group) if ranks is None else ranks
        if first_place != last_place:
            _refuse_other_methods(refusal, group, members, error)
        _refuse(refusal, group, members, error, outcome)
    agreement.is_alike = lowest == highest


def spread(
    pairs: Sequence[tuple[int, int]], group: dist.ProcessGroup | None, device: torch.device | str
) -> list[tuple[int, int]]:
    """Of each pair the lowest first and the highest second number of all ranks, in one reduction. Collective.

    Args:
        pairs: numbers of 32 bits, as many on every rank.
        group: the ranks; None is the default group.
        device: where the group communicates.
    """
    if dist.get_world_size(group) == 1:
        return list(pairs)
    sent = [[-lowest, highest] for lowest, highest in pairs]
    numbers = torch.tensor(sent, dtype=torch.int32, device=device)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    return [(-negated, highest) for negated, highest in numbers.tolist()]


def check_version(version: int, error: type[HybridFlowError]) -> None:
    """Refuses what is not a version of weights: a whole number from 0 on, which ranks can agree on.

    Args:
        version: to check.
        error: raised for what is not a version.
    """
    Checks(error).count("version", version, least=0)
    if version >= HIGHEST:
        raise error(f"version={version} must be below {HIGHEST}. Count the changes of the weights")


def _refuse_other_methods(
    refusal: BaseException | None,
    group: dist.ProcessGroup | None,
    ranks: Sequence[int],
    error: type[HybridFlowError],
) -> NoReturn:
    """Says which rank called which method, on every rank of a group that knows that these differ. Collective."""
    gathered = [""] * len(ranks)
    dist.all_gather_object(gathered, _find_method(), group=group)
    callers: dict[str, list[int]] = {}
    for rank, method in zip(ranks, gathered, strict=True):
        callers.setdefault(method, []).append(rank)
    named = [
        f"rank {first}{f' and {len(more)} more' if more else ''} called {method}"
        for method, (first, *more) in callers.items()
    ]
    raise error(
        f"the ranks are in different methods: {', '.join(named)}; nothing was done. Call the same methods in the same "
        "order on all ranks"
    ) from refusal


def _find_method() -> str:
    """The method of this package that the program called: the outermost one of this thread."""
    method = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(_PACKAGE) and not module.startswith(f"{_PACKAGE}testing."):
            method = frame.f_code.co_name
        frame = frame.f_back
    return method


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
    gathered: list[str | None] = [None] * len(ranks)
    dist.all_gather_object(gathered, reason, group=group)
    if isinstance(refusal, HybridFlowError):
        raise refusal
    reasons: dict[str, int] = {}
    for rank, given in zip(ranks, gathered, strict=True):
        if given is not None:
            reasons.setdefault(given, rank)
    text = "; ".join(f"rank {rank} refused: {given}" for given, rank in reasons.items())
    raise error(f"{text}; {outcome}") from refusal
