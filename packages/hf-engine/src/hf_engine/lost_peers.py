"""What a rank says and does when another one died, did not come, or failed in the middle of what all are in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from hf_protocols.errors import BackendError, HybridFlowError, ReshardError

__all__ = ["describe_failure", "failures_end_all", "is_of_a_lost_peer", "lost_peers_are_errors"]

# gloo's errors have no class of their own. Most name its source files; the one of a rank that had a pair closed by its
# own deadline says nothing else.
_OF_GLOO = re.compile(r"/gloo/[\w/]+\.(cc|h):\d+\]|Application timeout caused pair closure")

_FAILURE = "hf_engine/failure"
"""Key of a store: which rank failed first in the middle of something, and why."""
_NEVER_SENT = 2**30 + 7
"""Tag of a message that nobody sends."""
_START_AGAIN = "The process groups cannot be used again: start the ranks again from a checkpoint"
_JOIN_AGAIN = (
    "The group that joins them cannot be used again: join the ranks again, after a new start of a side that lost a rank"
)


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


def describe_failure(
    action: str, error: BaseException, *, rank: int | None = None, group: dist.ProcessGroup | None = None
) -> str:
    """What a rank says whose action failed: where another rank is the reason, which one, why, and what to do now.

    Then this rank's connections are closed too: others may wait for it in other groups and not know yet. Those of a
    group that joins ranks of two worlds are closed alone.

    Args:
        action: `"train_step"`.
        error: what torch.distributed, or another library, raised.
        rank: what this rank is called; None: by its global rank.
        group: in which it happened; None is the default group.
    """
    name = dist.get_rank() if rank is None else rank
    if not is_of_a_lost_peer(error):
        return "; ".join([f"{action} failed on rank {name}: {error}", *getattr(error, "__notes__", ())])
    if group is not None and _joins_worlds(group) and _Ended.with_(None).told_failure():
        group, name = None, dist.get_rank()  # a rank of this world failed in its own groups
    ended = _Ended.with_(group)
    ended.hang_up()
    if failure := ended.told_failure():
        return f"{action} ended on rank {name}: {failure}. {ended.remedy}"
    return (
        f"{action} lost another rank on rank {name}: {error}; that rank's own error says why. {ended.remedy}. A rank "
        f"that was only slow needs a longer {ended.deadline}"
    )


@contextmanager
def failures_end_all(outcome: str, *, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """A part that all ranks have to get through: one rank's failure ends the others, which say who failed and why.

    A rank in a collective cannot be asked. So this one leaves its reason in the store and closes its connections: what
    waits for it fails at once (over gloo; over NCCL at the groups' deadline), and `describe_failure` reads why.

    Args:
        outcome: what came of it on all ranks: `"no rank took the step"`.
        group: as in `describe_failure`.
    """
    try:
        yield
    except Exception as error:
        if not dist.is_initialized() or is_of_a_lost_peer(error):
            raise
        ended = _Ended.with_(group)
        if any(each.size() > 1 for each in ended.groups):
            ended.tell(f"{type(error).__name__}: {error}; {outcome}")
            ended.hang_up()
            error.add_note(f"{outcome}; the other ranks were told. {ended.remedy}")
        raise


def is_of_a_lost_peer(error: BaseException | None) -> bool:
    """Whether torch.distributed raised it, or what it came from, because another rank died or did not come."""
    if isinstance(error, HybridFlowError) and error.__cause__ is not None:
        return is_of_a_lost_peer(error.__cause__)
    # Of another class it is somebody else's text, of a path for example.
    is_of_gloo = type(error) is RuntimeError and _OF_GLOO.search(str(error)) is not None
    return is_of_gloo or isinstance(error, dist.DistError)


class _Place(NamedTuple):
    """Where the ranks of some groups look for a reason, and what this rank is called there."""

    store: Store
    rank: int


@dataclass(frozen=True)
class _Ended:
    """What ends with a group: all that this process is in; or alone a group that joins it with ranks of another world,
    whose own groups live on.
    """

    groups: list[dist.ProcessGroup]
    places: list[_Place]
    """The first is that of the group."""
    remedy: str
    deadline: str

    @staticmethod
    def with_(group: dist.ProcessGroup | None) -> _Ended:
        """What ends with this group; None is the default one."""
        known = dist.distributed_c10d._world.pg_map
        joint = {each: _Place(store, each.rank()) for each, (_, store) in known.items() if _joins_worlds(each)}
        if group in joint:
            return _Ended([group], [joint[group]], _JOIN_AGAIN, "deadline of its groups, such as collective_timeout_s")
        own = _Place(dist.distributed_c10d._get_default_store(), dist.get_rank())
        return _Ended([*known], [own, *joint.values()], _START_AGAIN, "timeout of init_process_group")

    def tell(self, reason: str) -> None:
        """Leaves it for the others, where nothing was left before."""
        for store, rank in self.places:
            told = f"rank {rank} failed: {reason}".encode(errors="replace").decode()  # a path may be no text
            with suppress(RuntimeError):  # the process that holds the store is gone
                store.compare_set(_FAILURE, "", told)

    def told_failure(self) -> str | None:
        """Which rank failed first, and why; None where none did, or nothing can be read any more."""
        store, _ = self.places[0]
        with suppress(RuntimeError):
            if store.check([_FAILURE]):
                told: bytes = store.get(_FAILURE)
                return told.decode()
        return None

    def hang_up(self) -> None:
        """Closes this process's connections over gloo: whoever waits for it there gets an error now.

        gloo has no call for it, but closes all connections of a group when a receive's deadline passes.
        """
        for group in self.groups:
            if "cpu:gloo" in dist.get_backend_config(group):
                own, size = group.rank(), group.size()
                for peer in range(own + 1, own + size):  # one that is open closes all; closed ones raise at once
                    with suppress(RuntimeError):  # the deadline, or they are closed
                        receive = dist.irecv(torch.empty(1), group=group, group_src=peer % size, tag=_NEVER_SENT)
                        assert receive is not None, "this rank is in the groups that it knows"
                        receive.wait(timedelta(milliseconds=1))


def _joins_worlds(group: dist.ProcessGroup) -> bool:
    """Whether ranks of another world are in it: then its ranks are counted otherwise than in this world."""
    ranks = dist.distributed_c10d._world.pg_group_ranks[group]
    return ranks.get(dist.get_rank()) != group.rank() or max(ranks) >= dist.get_world_size()
