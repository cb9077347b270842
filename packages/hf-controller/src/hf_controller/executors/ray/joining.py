"""Connections between groups: checks which can be connected, and plans each rank's part."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence

from hf_controller.executors.ray.actor import Joining
from hf_controller.executors.ray.host_set import HostSet
from hf_controller.groups.worker_group import WorkerGroup
from hf_protocols import ProtocolError
from hf_protocols.validation import show

__all__ = ["check_connection", "plan_joinings"]


def check_connection(first: WorkerGroup, second: WorkerGroup, host_sets: Sequence[HostSet], name: str) -> None:
    """Refuse groups that cannot meet in a collective, before any rank waits for others.

    Raises:
        ProtocolError: naming the groups.
        HybridFlowError: the first failure of a group that ended.
    """
    for host_set in host_sets:
        if host_set.failure is not None:
            raise host_set.failure.to_error()
    if host_sets[0] is host_sets[1]:
        raise ProtocolError(f"{first.role} and {second.role} share their processes: they have one group already")
    if first.pool is second.pool:
        raise ProtocolError(
            f"{first.role} and {second.role} stand on one pool ({show(first.pool.name)}) and take "
            f"turns, so they never "
            "meet in a collective: give each a pool of its own, or fuse them (fused=True)"
        )
    if first.role == second.role:
        raise ProtocolError(f"both groups have the role {show(first.role)}, which tells a connection's sides apart")
    for group, host_set in zip((first, second), host_sets, strict=True):
        host_set.check_connection(group.role, name)


def plan_joinings(
    first: WorkerGroup, second: WorkerGroup, name: str, *, on_one_machine: bool, timeout_s: float
) -> list[Joining]:
    """Plans a connection, for the ranks of each group."""
    border, end = first.world_size, first.world_size + second.world_size
    joining = Joining(
        name=name,
        token=uuid.uuid4().hex,
        role=first.role,
        ranks={first.role: tuple(range(border)), second.role: tuple(range(border, end))},
        device="cpu" if "cpu" in (first.pool.device, second.pool.device) else "cuda:0",
        on_one_machine=on_one_machine,
        timeout_s=timeout_s,
    )
    return [dataclasses.replace(joining, role=group.role) for group in (first, second)]
