"""What data-parallel ranks agree on before they act together: one rank's trouble must stop them all, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NoReturn
from zlib import crc32

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from hf_engine.backends._all_or_none import what_came_first
from hf_engine.backends._micro_batches import MicroBatch, SequenceBatch
from hf_engine.lost_peers import is_of_a_lost_peer
from hf_engine.process_groups import local_device
from hf_engine.resharding.agreement import refuse_together
from hf_protocols.errors import BackendError, BatchError, HybridFlowError

__all__ = ["agree_on_micro_batches", "together"]


@contextmanager
def together(action: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """A block that every rank of a group gets through, or none. Collective at its end.

    Args:
        action: what the block does, for the error: `"write"`.
        group: the ranks that run it at the same time; None is the default group.

    Raises:
        BackendError: on every rank, if the block failed on any, with the ranks' reasons; the first rank's of equal
            ones. Not for a lost rank: nobody could be told.
    """
    failure: BackendError | None = None
    reason: str | None = None
    try:
        yield
    except Exception as error:
        if is_of_a_lost_peer(error):
            raise
        known = isinstance(error, OSError | HybridFlowError | SafetensorError)
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        failure = BackendError(f"could not {action}: {reason}")
        failure.__cause__ = error
    local_device()  # NCCL sends objects through the current one
    told: list[str | None] = [None] * dist.get_world_size(group)
    with what_came_first(failure):
        dist.all_gather_object(told, reason, group=group)
    reasons: dict[str, int] = {}
    for rank, given in enumerate(told):
        if given is not None:
            reasons.setdefault(given, rank)
    if reasons:
        refused = "; ".join(f"rank {rank}: {reason}" for reason, rank in reasons.items())
        raise BackendError(f"could not {action}: {refused}") from failure and failure.__cause__


def agree_on_micro_batches(
    prepare: Callable[[], SequenceBatch],
    max_tokens: int,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    needs_rows: bool,
    replicas: Sequence[int] | None = None,
    arguments: Mapping[str, object] | None = None,
) -> tuple[SequenceBatch, list[MicroBatch]]:
    """This rank's rows and micro-batches, with as many dummies as keep it in step with the rank that has most.

    At least one micro-batch, on every rank.

    Args:
        prepare: checks the arguments and reads this rank's rows.
        max_tokens: bound on the tokens of a micro-batch, padding included.
        group: the ranks that act together: the data-parallel ones, or more.
        device: where the group communicates.
        needs_rows: refuses a batch of which no rank has a row.
        replicas: for every rank of the group the number of its replica, all ranks of which have the same rows; None
            where every rank has rows of its own.
        arguments: by name, what else all ranks are given alike; of a function its name counts.

    Raises:
        HybridFlowError: on every rank, if any refuses its arguments or rows: its own refusal there, on the others a
            BatchError that names the rank and says why. Or if none has a row and one is needed, ranks of one replica
            have different ones, or any ranks different arguments.
    """
    refusal: Exception | None = None
    micro_batches: list[MicroBatch] = []
    given: dict[str, str] = {}
    digest = common = 0
    try:
        sequences = prepare()
        micro_batches = sequences.micro_batches(max_tokens)
        given = {name: _described(value) for name, value in (arguments or {}).items()}
        digest, common = sequences.digest() if replicas else 0, crc32(repr(given).encode())
    except Exception as error:  # noqa: BLE001 - whatever it is, the others are told
        refusal = error
    digests = _by_replica(digest, replicas or (), group)
    agreed = torch.tensor([len(micro_batches), refusal is not None, common, -common, *digests], device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    num_micro_batches, refused, highest, negated, *digests = agreed.tolist()
    if refused:
        ranks = dist.get_process_group_ranks(group)
        refuse_together(refusal, group, ranks, BatchError, "the other ranks computed nothing")
    if highest != -negated:
        _refuse_other_arguments(given, group)
    if replicas and any(highest != -negated for highest, negated in zip(digests[::2], digests[1::2], strict=True)):
        _refuse_other_rows(digest, replicas, group)
    if needs_rows and not num_micro_batches:
        raise BatchError("the batch has no rows on any data-parallel rank: there is nothing to take a step on")
    dummies = [MicroBatch.dummy() for _ in range(max(1, num_micro_batches) - len(micro_batches))]
    return sequences, micro_batches + dummies


def _by_replica(digest: int, replicas: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """What the largest of all ranks shows the highest and the lowest digest of every replica of."""
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
    told: list[Mapping[str, str]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(told, given, group=group)
    first, *others = dist.get_process_group_ranks(group)
    differences = [
        f"rank {rank} was given {name}={theirs.get(name)}, rank {first} {name}={told[0].get(name)}"
        for rank, theirs in zip(others, told[1:], strict=True)
        for name in given
        if theirs.get(name) != told[0].get(name)
    ]
    raise BatchError(
        f"{'; '.join(differences)}: give all ranks the same, as denominator the sum over all of them; the ranks "
        "computed nothing"
    )


def _refuse_other_rows(digest: int, replicas: Sequence[int], group: dist.ProcessGroup) -> NoReturn:
    """Names the ranks that were given other rows than the first of their replica. Collective."""
    told = [0] * len(replicas)
    dist.all_gather_object(told, digest, group=group)
    ranks = dist.get_process_group_ranks(group)
    first = {replica: replicas.index(replica) for replica in replicas}
    others = [
        f"rank {ranks[index]} was given other rows than rank {ranks[first[replica]]}, which is in the same replica"
        for index, replica in enumerate(replicas)
        if told[index] != told[first[replica]]
    ]
    raise BatchError(
        f"{'; '.join(others)}: give all {replicas.count(0)} ranks of a replica the same batch; the ranks computed "
        "nothing"
    )
