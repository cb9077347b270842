"""After a failure: tear down what stood on a pool and build the same groups again, in the same program.

The new workers start as their constructors leave them. Weights and optimizer state are the program's to load: nothing
here opens a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from hf_protocols import PoolError
from hf_protocols.validation import Checks

if TYPE_CHECKING:
    from hf_controller.executors.base import Executor
    from hf_controller.groups.resource_pool import ResourcePool
    from hf_controller.groups.worker_group import WorkerGroup

__all__ = ["rebuild"]

_check = Checks(PoolError)


def rebuild(executor: Executor, pools: Iterable[ResourcePool]) -> dict[str, WorkerGroup]:
    """Closes every group on `pools` and builds it again from its spec; waits until all workers are constructed.

    Pools whose groups failed together with one of these, through a connection, are built again with them. Processes
    that hang or are gone are killed, not asked. The old groups, their results that were not read yet, and
    their connections (`hf_controller.connect`) are gone; groups on other pools stay as they are. It is all or
    nothing: after an error no group is left on `pools`, and they can be built on by `build_groups`.

    Args:
        executor: the executor that the groups were built with.
        pools: the pools that lost a rank.

    Returns:
        The new groups by role.

    Raises:
        PoolError: for a pool without groups, pools that have groups of the same role, or if the cluster no longer has
            the slots.
        HybridFlowError: what a worker's constructor raised.
        WorkerTimeoutError: if a worker is not constructed in time.
    """
    from hf_controller.executors.base import Executor, check_pool

    _check.kind("executor", executor, Executor, "the executor that the groups were built with")
    _check.kind("pools", pools, Iterable, "a list of ResourcePools")
    pools = list(pools)
    for pool in pools:
        check_pool(pool)
    pools = list(dict.fromkeys(each for pool in pools for each in executor.failed_with(pool)))
    standing = {pool: executor.built_on(pool) for pool in pools}
    empty = [pool.name for pool, sets in standing.items() if not sets]
    if empty:
        raise PoolError(f"no group is on pool {', '.join(map(repr, empty))}. Use build_groups(...)")
    roles = [role for sets in standing.values() for specs in sets for role in specs]
    twice = sorted({role for role in roles if roles.count(role) > 1})
    if twice:
        raise PoolError(
            f"several of the pools {', '.join(repr(pool.name) for pool in standing)} have a group {', '.join(twice)}, "
            "and new groups are distinguished by role only. Rebuild these pools one by one"
        )
    for pool in standing:
        executor.release(pool)
        executor.failure_log.forget(pool)
    groups: dict[str, WorkerGroup] = {}
    with ExitStack() as undo:
        for pool in standing:
            undo.callback(executor.release, pool)
        for pool, sets in standing.items():
            for specs in sets:
                groups |= executor.build_groups(pool, specs, fused=len(specs) > 1, wait=False)
        executor.wait_until_ready()
        undo.pop_all()
    return groups
