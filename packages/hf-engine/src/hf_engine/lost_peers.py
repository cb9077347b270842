"""What a rank says and does when another one died, did not come, or failed in the middle of what all are in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from hf_protocols.errors import BackendError, HybridFlowError, ReshardError

__all__ = ["describe_failure", "failures_end_all", "is_of_a_lost_peer", "lost_peers_are_errors"]

# gloo's errors have no class of their own. Most name its source files; the one of a rank that had a pair closed by its
# own deadline says nothing else.
_OF_GLOO = re.compile(r"/gloo/[\w/]+\.(cc|h):\d+\]|Application timeout caused pair closure")

_FAILURE = "hf_engine/failure"
"""Key of the store: which rank failed first in the middle of something, and why."""
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
        assert reason is not None, "or it is of no lost peer"
        raise BackendError(describe_failure(method, reason)) from error


def describe_failure(action: str, error: BaseException, rank: int | None = None) -> str:
    """What a rank says whose action failed: where another rank is the reason, which one, why, and what to do now.

    Then this rank's connections are closed too: others may wait for it in other groups and not know yet.

    Args:
        action: `"train_step"`.
        error: what torch.distributed, or another library, raised.
        rank: what this rank is called; None: by its global rank.
    """
    rank = dist.get_rank() if rank is None else rank
    if not is_of_a_lost_peer(error):
        return "; ".join([f"{action} failed on rank {rank}: {error}", *getattr(error, "__notes__", ())])
    _hang_up()
    failure = _told_failure()
    if failure:
        return f"{action} ended on rank {rank}: {failure}. {_ANEW}"
    return (
        f"{action} lost another rank on rank {rank}: {error}; that rank's own error says why. {_ANEW}. A rank that was "
        "only slow needs a longer timeout of init_process_group"
    )


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
        if any(group.size() > 1 for group in _groups()) and not is_of_a_lost_peer(error):
            told = f"rank {dist.get_rank()} failed: {type(error).__name__}: {error}; {outcome}"
            told = told.encode(errors="replace").decode()  # a path may be no text
            with suppress(RuntimeError):  # the process that holds the store is gone
                dist.distributed_c10d._get_default_store().compare_set(_FAILURE, "", told)
            _hang_up()
            error.add_note(f"{outcome}; the other ranks were told. {_ANEW}")
        raise


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
    for group in _groups():
        if "cpu:gloo" in dist.get_backend_config(group):
            own, size = group.rank(), group.size()
            for peer in range(own + 1, own + size):  # one that is open closes all; those that are closed raise at once
                with suppress(RuntimeError):  # the deadline, or they are closed
                    receive = dist.irecv(torch.empty(1), group=group, group_src=peer % size, tag=_NEVER_SENT)
                    assert receive is not None, "this rank is in the groups that it knows"
                    receive.wait(timedelta(milliseconds=1))


def _groups() -> list[dist.ProcessGroup]:
    """All that this process is in, also those that join it with ranks of another world."""
    return [*dist.distributed_c10d._world.pg_map]
