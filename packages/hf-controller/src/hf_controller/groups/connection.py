"""A process group that joins two worker groups, for data that moves between them outside calls, such as weights."""

from __future__ import annotations

from hf_controller.groups.worker_group import WorkerGroup
from hf_protocols import ProtocolError
from hf_protocols.validation import Checks

__all__ = ["connect"]

_check = Checks(ProtocolError)


def connect(first: WorkerGroup, second: WorkerGroup, *, name: str | None = None) -> str:
    """Join the ranks of two disjoint groups in one process group, and wait until they met.

    Their workers find it in `self.context.connections[name]`. When one group ends, in `rebuild` say, the other
    leaves the connection, and its name is free; so it is after an error. Joint ranks count `first`'s ranks, then
    `second`'s.

    Args:
        first: a group.
        second: a group of other processes, of the same executor.
        name: the connection's name; `"first-second"` after the roles by default.

    Returns:
        The name.

    Raises:
        ProtocolError: if the groups share processes or run in different executors, or the name is taken.
        HybridFlowError: what went wrong on a rank.
        WorkerTimeoutError: if the ranks do not meet in time.
    """
    for side, group in (("first", first), ("second", second)):
        _check.kind(f"connect: {side}", group, WorkerGroup, "a WorkerGroup")
    _check.kind("connect: name", name, str | None, "a string")
    if first.executor is not second.executor:
        raise ProtocolError(f"{first.role} and {second.role} belong to different executors. Build both with one")
    name = name or f"{first.role}-{second.role}"
    first.executor.connect(first, second, name)
    return name
