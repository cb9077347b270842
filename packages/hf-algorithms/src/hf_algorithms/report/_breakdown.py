"""Breakdown of the time of a run by role and method, and by pool, computed from the calls of its trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hf_algorithms.report._json_values import read_number
from hf_algorithms.report._timeline import TimelineCall
from hf_protocols.errors import DataError
from hf_protocols.validation import show

__all__ = ["Breakdown", "PoolUsage", "Usage", "compute_breakdown", "measure_union"]

Key = TypeVar("Key")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Time and bytes of the calls of a role, or of one of its methods, summed over calls and ranks.

    Attributes:
        role: the role.
        method: the method, or None for all methods of the role.
        num_calls: calls; one that ran on four ranks counts once.
        num_failed: of them, those that failed on a rank.
        queue_s: from the call to its turn: earlier calls, and inputs that were not there yet.
        fetch_s: fetching and assembling rows.
        compute_s: inside the method.
        store_s: storing results.
        bytes_read: bytes of the rows that the method was given.
        remote_bytes: bytes of columns that came from other machines for it.
        wall_share: share of the wall time in which at least one rank was busy with it.
    """

    role: str
    method: str | None
    num_calls: int
    num_failed: int
    queue_s: float
    fetch_s: float
    compute_s: float
    store_s: float
    bytes_read: int
    remote_bytes: int
    wall_share: float


@dataclass(frozen=True, kw_only=True)
class PoolUsage:
    """Busy time of the slots of a pool. A slot is busy while a call on it fetches, computes or stores.

    Attributes:
        pool: its name.
        num_slots: slots that took at least one call.
        busy_s: summed over slots; calls of several roles that overlap on one slot count once.
        idle_share: 1 - busy_s / (num_slots * wall_s).
    """

    pool: str
    num_slots: int
    busy_s: float
    idle_share: float


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Times of all calls of a trace.

    Attributes:
        wall_s: from the start of the first call's work to the end of the last one's, over all pools.
        roles: one per role, the busiest first.
        methods: one per role and method, in the order of their first calls.
        pools: one per pool, by name.
    """

    wall_s: float
    roles: tuple[Usage, ...]
    methods: tuple[Usage, ...]
    pools: tuple[PoolUsage, ...]


def compute_breakdown(calls: Sequence[TimelineCall]) -> Breakdown:
    """Returns the breakdown of the workers' calls among `calls`; other spans are left out.

    Raises:
        DataError: if the trace does not contain the call, or a span of it does not have its times.
    """
    calls = sorted((call for call in calls if "call" in call.arguments), key=lambda call: call.start_us)
    if not calls:
        raise DataError("the trace has no call of a worker")
    wall_us = max(call.end_us for call in calls) - calls[0].start_us
    roles = [_measure(role, None, group, wall_us) for role, group in _group(calls, lambda call: call.role)]
    methods = [
        _measure(group[0].role, method, group, wall_us)
        for (_, method), group in _group(calls, lambda call: (call.role, call.method))
    ]
    pools = [_measure_pool(pool, group, wall_us) for pool, group in _group(calls, _pool)]
    return Breakdown(
        wall_s=wall_us / 1e6,
        roles=tuple(sorted(roles, key=lambda usage: -usage.wall_share)),
        methods=tuple(methods),
        pools=tuple(sorted(pools, key=lambda usage: usage.pool)),
    )


def _measure(role: str, method: str | None, calls: Sequence[TimelineCall], wall_us: float) -> Usage:
    total = {
        name: sum(_number(call, name) for call in calls)
        for name in ("queue_ms", "fetch_ms", "compute_ms", "store_ms", "bytes_read", "remote_bytes")
    }
    return Usage(
        role=role,
        method=method,
        num_calls=len({call.key for call in calls}),
        num_failed=len({call.key for call in calls if call.failed}),
        queue_s=total["queue_ms"] / 1e3,
        fetch_s=total["fetch_ms"] / 1e3,
        compute_s=total["compute_ms"] / 1e3,
        store_s=total["store_ms"] / 1e3,
        bytes_read=int(total["bytes_read"]),
        remote_bytes=int(total["remote_bytes"]),
        wall_share=_share(measure_union(calls), wall_us),
    )


def _measure_pool(pool: str, calls: Sequence[TimelineCall], wall_us: float) -> PoolUsage:
    # Roles of one pool that have processes of their own share its slots: rank i of each is on slot i.
    slots = [group for _, group in _group(calls, lambda call: call.row[1])]
    busy_us = sum(map(measure_union, slots))
    return PoolUsage(
        pool=pool,
        num_slots=len(slots),
        busy_s=busy_us / 1e6,
        idle_share=1.0 - _share(busy_us, len(slots) * wall_us),
    )


def measure_union(calls: Iterable[TimelineCall]) -> float:
    """Microseconds in which at least one of the calls runs."""
    total_us, until_us = 0.0, -math.inf
    for call in sorted(calls, key=lambda call: call.start_us):
        total_us += max(0.0, call.end_us - max(call.start_us, until_us))
        until_us = max(until_us, call.end_us)
    return total_us


def _share(part_us: float, whole_us: float) -> float:
    return part_us / whole_us if whole_us > 0 else 1.0


def _group(
    calls: Iterable[TimelineCall], key_of: Callable[[TimelineCall], Key]
) -> list[tuple[Key, list[TimelineCall]]]:
    groups: dict[Key, list[TimelineCall]] = {}
    for call in calls:
        groups.setdefault(key_of(call), []).append(call)
    return list(groups.items())


def _pool(call: TimelineCall) -> str:
    pool: Any = call.arguments.get("pool")
    if not isinstance(pool, str):
        raise DataError(f"{call.name} (call {call.key}) has pool={show(pool)} instead of a name")
    return pool


def _number(call: TimelineCall, name: str) -> float:
    value = call.arguments.get(name)
    number = read_number(value)
    if number is None or number < 0:
        raise DataError(f"{call.name} (call {call.key}) has {name}={show(value)} instead of a number of at least 0")
    return number
