"""Agreements of data-parallel ranks on a batch, before they act together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, NoReturn
from zlib import crc32

import torch
import torch.distributed as dist

from hf_engine.agreement import together
from hf_engine.training.micro_batches import MicroBatch, SequenceBatch
from hf_protocols.errors import BatchError

__all__ = ["AgreedBatch", "agree_on_micro_batches"]


class AgreedBatch(NamedTuple):
    """Rows and micro-batches of this rank, and what all ranks have in common."""

    sequences: SequenceBatch
    micro_batches: Sequence[MicroBatch]
    """At least one, and as many on every rank."""
    all_hold_weights: bool
    """True if every rank passed `holds_weights=True`."""


def agree_on_micro_batches(
    prepare: Callable[[], SequenceBatch],
    max_tokens: int,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    needs_rows: bool,
    enough_tokens: int | None = None,
    replicas: Sequence[int] | None = None,
    arguments: Mapping[str, object] | None = None,
    kept: tuple[Sequence[torch.Tensor], Sequence[MicroBatch]] | None = None,
    holds_weights: bool = True,
) -> AgreedBatch:
    """This rank's rows and micro-batches, with as many dummies as keep it in step with the rank that has most.

    Args:
        prepare: checks the arguments and reads this rank's rows.
        max_tokens: bound on the tokens of a micro-batch, padding included.
        group: the ranks that act together: the data-parallel ones, or more.
        device: where the group communicates.
        needs_rows: for a loss, which reads the batch: refuses columns that no loss can read, on ranks without rows too,
            and a batch of which no rank has a row.
        enough_tokens: see `SequenceBatch.micro_batches`. Ranks may differ in it where each has rows of its own.
        replicas: for every rank of the group the number of its replica, all ranks of which have the same rows; None
            where every rank has rows of its own.
        arguments: by name, what else all ranks are given alike; of a function its name counts.
        kept: `list_tokens` of an earlier pass, and its micro-batches with dummies. These micro-batches are returned
            themselves if every rank has the rows of its own earlier pass.
        holds_weights: whether this rank still has the weights that an earlier pass gathered from all ranks.

    Raises:
        HybridFlowError: on every rank, if any refuses its arguments or rows: its own refusal there, on the others a
            BatchError that names the rank and says why. Also if no rank has a row and one is needed, if ranks of one
            replica have different rows, if any ranks have different arguments, or if they are in different methods.
    """
    # Scoring passes forward, a step backward too: in different methods ranks would meet in other collectives.
    outcome = "the other ranks computed nothing"
    with together(outcome, group, error=BatchError, device=device, same_method=True) as agreement:
        sequences = prepare()
        if needs_rows:
            sequences.check_columns()
        differs = kept is None or not all(map(torch.equal, sequences.list_tokens(), kept[0]))
        micro_batches = sequences.micro_batches(max_tokens, enough_tokens) if kept is None or differs else kept[1]
        micro_batches = [each for each in micro_batches if len(each.rows)]
        given = {name: _described(value) for name, value in (arguments or {}).items()}
        agreement.number = crc32(repr(given).encode())
        digest = sequences.digest() if replicas else 0
    if not agreement.is_alike:
        _refuse_other_arguments(given, group)
    num_micro_batches, *digests = len(micro_batches), *_by_replica(digest, replicas or (), group)
    if dist.get_world_size(group) > 1:
        agreed = torch.tensor([num_micro_batches, differs, not holds_weights, *digests], device=device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
        num_micro_batches, differs, lacks_weights, *digests = agreed.tolist()
        holds_weights = not lacks_weights
    if replicas and any(highest != -negated for highest, negated in zip(digests[::2], digests[1::2], strict=True)):
        _refuse_other_rows(digest, replicas, group)
    if needs_rows and not num_micro_batches:
        raise BatchError("the batch has no rows on any data-parallel rank: there is nothing to take a step on")
    if kept is not None and not differs:
        return AgreedBatch(sequences, kept[1], holds_weights)
    dummies = [MicroBatch.dummy() for _ in range(max(1, num_micro_batches) - len(micro_batches))]
    return AgreedBatch(sequences, micro_batches + dummies, holds_weights)


def _by_replica(digest: int, replicas: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """Returns a list whose maximum over all ranks shows each replica's highest and lowest digest."""
    found = [-(1 << 32)] * (2 * len({*replicas}))
    if replicas:
        own = 2 * replicas[dist.get_rank(group)]
        found[own : own + 2] = digest, -digest
    return found


def _described(value: object) -> str:
    """The same text on every rank: of a function its name, because its address differs; 1 and 1.0 are one number."""
    while isinstance(value, partial):
        value = value.func
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return repr(float(value) if isinstance(value, int | float) else value)


def _refuse_other_arguments(given: Mapping[str, str], group: dist.ProcessGroup) -> NoReturn:
    """Names the ranks that were given something else than the first one, and what. Collective."""
    gathered: list[Mapping[str, str]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(gathered, given, group=group)
    first, *others = dist.get_process_group_ranks(group)
    differences = [
        f"rank {rank} was given {name}={theirs.get(name)}, rank {first} {name}={gathered[0].get(name)}"
        for rank, theirs in zip(others, gathered[1:], strict=True)
        for name in given
        if theirs.get(name) != gathered[0].get(name)
    ]
    raise BatchError(
        f"{'; '.join(differences)}; the ranks computed nothing. Give all ranks the same; the denominator is the sum "
        "over all of them"
    )


def _refuse_other_rows(digest: int, replicas: Sequence[int], group: dist.ProcessGroup) -> NoReturn:
    """Names the ranks that were given other rows than the first of their replica. Collective."""
    gathered = [0] * len(replicas)
    dist.all_gather_object(gathered, digest, group=group)
    ranks = dist.get_process_group_ranks(group)
    first = {replica: replicas.index(replica) for replica in replicas}
    others = [
        f"rank {ranks[index]} was given other rows than rank {ranks[first[replica]]}, which is in the same replica"
        for index, replica in enumerate(replicas)
        if gathered[index] != gathered[first[replica]]
    ]
    raise BatchError(
        f"{'; '.join(others)}; the ranks computed nothing. Give all {replicas.count(0)} ranks of a replica the same "
        "batch"
    )
