"""The processes that hold the same roles: one actor per rank of a pool."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from hf_controller.executors.ray.actor import Construction, HostActor
from hf_controller.executors.ray.placement import PlacedPool
from hf_controller.executors.ray.shipping import pickle_specs
from hf_controller.executors.ray.waiting import Waiter
from hf_controller.failures import Failure
from hf_controller.worker import WorkerSpec
from hf_protocols import WorkerTimeoutError

__all__ = ["HostSet", "await_ready"]


class HostSet:
    """Starts the processes and the construction of their workers, and does not wait for it.

    Args:
        placed: the pool, with its slots.
        roles: the roles that share these processes.
        collective_timeout_s: deadline of every collective in their default process group.

    Attributes:
        actors: the actor of every rank.
        constructing: the label of every rank, such as ``"actor/0"``, by the handle of its construction.
    """

    def __init__(self, placed: PlacedPool, roles: Mapping[str, WorkerSpec], *, collective_timeout_s: float) -> None:
        pool = placed.pool
        self.name = "+".join(roles)
        decorate: Any = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"service": 4})  # type: ignore[call-overload]
        host_actor = decorate(HostActor)
        self.actors = [
            host_actor.options(**placed.options(rank)).remote(self.name, rank, pool.num_slots)
            for rank in range(pool.num_slots)
        ]
        process_group = any(spec.worker.needs_process_group for spec in roles.values())
        construction = Construction(
            specs=pickle_specs(roles),
            pool=pool.name,
            device=pool.device,
            process_group=process_group,
            on_one_machine=placed.on_one_machine,
            collective_timeout_s=collective_timeout_s,
        )
        rendezvous = None
        if process_group and pool.num_slots > 1:
            rendezvous = self.actors[0].open_rendezvous.remote(placed.on_one_machine)
        self.constructing = {
            actor.construct.remote(construction, rendezvous): f"{self.name}/{rank}"
            for rank, actor in enumerate(self.actors)
        }

    def close(self, timeout_s: float) -> None:
        """Ask every worker to close, as far as they answer in time."""
        asked = [actor.close.remote() for actor in self.actors]
        ray.wait(asked, num_returns=len(asked), timeout=timeout_s)

    def kill(self) -> None:
        """End the processes at once."""
        for actor in self.actors:
            ray.kill(actor)


def await_ready(host_sets: Sequence[HostSet], timeout_s: float, waiter: Waiter) -> None:
    """Wait until every worker of ``host_sets`` is constructed.

    Raises:
        HybridFlowError: what the first constructor that failed raised.
        WorkerTimeoutError: if one is not done in time.
    """
    deadline_s = time.monotonic() + timeout_s
    labels = {handle: label for host_set in host_sets for handle, label in host_set.constructing.items()}
    pending = list(labels)
    while pending:
        ready = waiter.wait_some(pending, deadline_s - time.monotonic())
        if not ready:
            missing = ", ".join(sorted(labels[handle] for handle in pending))
            raise WorkerTimeoutError(
                f"{missing} not constructed within {timeout_s:g} s: raise start_timeout_s, or look at what the "
                "constructor waits for"
            )
        for handle in ready:
            failure = _construction_failure(handle, labels[handle])
            if failure is not None:
                raise failure.to_error()
        pending = [handle for handle in pending if handle not in ready]
    for host_set in host_sets:
        host_set.constructing.clear()


def _construction_failure(handle: Any, label: str) -> Failure | None:
    try:
        failure: Failure | None = ray.get(handle)
    except RayError as error:
        role, _, rank = label.rpartition("/")
        return Failure.of(error, role=role, method="__init__", rank=int(rank))
    return failure
