"""What a rank says and does when another one died, did not come, or failed in the middle of a pass or step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from hf_engine.process_groups import local_device
from hf_engine.resharding.agreement import HIGHEST, refuse_together, spread
from hf_protocols.errors import BackendError, HybridFlowError, ReshardError

__all__ = ["all_or_none", "failures_end_all", "is_of_a_lost_peer", "lost_peers_are_errors", "what_came_first"]

# gloo's errors have no class of their own. Most name its source files; the one of a rank that had a pair closed by its
# own deadline says nothing else.
_OF_GLOO = re.compile(r"/gloo/[\w/]+\.(cc|h):\d+\]|Application timeout caused pair closure")

_FAILURE = "hf_engine/failure"
"""Key of the store: which rank failed first in a pass or step, and why."""
_NEVER_SENT = 2**30 + 7
"""Tag of a message that nobody sends."""
_ANEW = "The process groups cannot be used again: start the ranks anew from a checkpoint"


@contextmanager
def lost_peers_are_errors(method: str) -> Iterator[None]:
    """Names the method whose collective failed because a rank failed, died or did not come within the groups' deadline.

    Raises:
        BackendError: in place of torch.distributed's error.
    """
    try:
        yield
    except (RuntimeError, ReshardError) as error:
        if not is_of_a_lost_peer(error):
            raise
        reason = error.__cause__ if isinstance(error, ReshardError) else error
        _hang_up()  # ranks that wait for this one in other groups do not know yet
        rank, failure = dist.get_rank(), _told_failure()
        if failure:
            raise BackendError(f"{method} ended on rank {rank}: {failure}. {_ANEW}") from error
        raise BackendError(
            f"{method} lost another rank on rank {rank}: {reason}; that rank's own error says why. {_ANEW}. A rank "
            "that was only slow needs a longer timeout of init_process_group"
        ) from error


@contextmanager
def failures_end_all(outcome: str) -> Iterator[None]:
    """A part that all ranks have to get through: one rank's failure ends the others, which say who failed and why.

    A rank in a collective cannot be asked. So this one leaves its reason in the store and closes its connections: what
    waits for it fails at once (over gloo; over NCCL at the groups' deadline), and `lost_peers_are_errors` reads why.

    Args:
        outcome: what came of it on all ranks: `"no rank took the step"`.
    """
    try:
        yield
    except Exception as error:
        if dist.get_world_size() > 1 and not is_of_a_lost_peer(error):
            told = f"rank {dist.get_rank()} failed: {type(error).__name__}: {error}; {outcome}"
            with suppress(RuntimeError):  # the process that holds the store is gone
                dist.distributed_c10d._get_default_store().compare_set(_FAILURE, "", told)
            _hang_up()
            error.add_note(f"{outcome}; the other ranks were told. {_ANEW}")
        raise


@contextmanager
def all_or_none(outcome: str) -> Iterator[None]:
    """A block that all ranks get through, or none. Collective at its end, over the default group.

    Nobody can be in a collective of the block when one fails: else see `failures_end_all`. The reasons travel only
    where there are some.

    Args:
        outcome: what comes of it where a rank failed: `"no rank generates"`.

    Raises:
        BackendError: on the ranks that did not fail, naming those that did and why. Not for a lost rank: nobody could
            be told.
    """
    refusal: Exception | None = None
    try:
        yield
    except Exception as error:
        if is_of_a_lost_peer(error):
            raise
        refusal = error
    number = 0 if refusal is None else HIGHEST
    with what_came_first(refusal):
        _, highest = spread(number, number, None, local_device())
        if highest == HIGHEST:
            refuse_together(refusal, None, range(dist.get_world_size()), BackendError, outcome)


@contextmanager
def what_came_first(failure: Exception | None) -> Iterator[None]:
    """A rank tells others that it failed: it says so itself, also where it could not because one of them is gone."""
    try:
        yield
    except Exception as error:
        if failure is None or error is failure or not is_of_a_lost_peer(error):
            raise
        raise failure from failure.__cause__


def is_of_a_lost_peer(error: BaseException | None) -> bool:
    """Whether torch.distributed raised it, or what it came from, because another rank died or did not come."""
    if isinstance(error, HybridFlowError) and error.__cause__ is not None:
        return is_of_a_lost_peer(error.__cause__)
    # Of another class it is somebody else's text, of a path for example.
    is_of_gloo = type(error) is RuntimeError and _OF_GLOO.search(str(error)) is not None
    return is_of_gloo or isinstance(error, dist.DistError)


def _told_failure() -> str | None:
    """Which rank failed first, and why; None where none did, or nothing can be read any more."""
    with suppress(RuntimeError):
        store = dist.distributed_c10d._get_default_store()
        if store.check([_FAILURE]):
            return store.get(_FAILURE).decode()
    return None


def _hang_up() -> None:
    """Closes this process's connections over gloo, those of all groups: whoever waits for it there gets an error now.

    gloo has no call for it, but closes all connections of a group when a receive's deadline passes.
    """
    for group in [*dist.distributed_c10d._world.pg_map]:
        if "cpu:gloo" in dist.get_backend_config(group) and (size := dist.get_world_size(group)) > 1:
            with suppress(RuntimeError):  # the deadline, or they are closed
                peer = (dist.get_rank(group) + 1) % size
                receive = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=_NEVER_SENT)
                assert receive is not None, "this rank is in the groups that it knows"
                receive.wait(timedelta(milliseconds=1))
