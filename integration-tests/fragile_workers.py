"""A worker that raises, sleeps or dies on request, and a group of two."""

from __future__ import annotations

import os
import time

import torch
from tensordict import TensorDict

from hf_controller.executors.base import Executor
from hf_controller.groups.resource_pool import ResourcePool
from hf_controller.groups.worker import Worker, WorkerSpec
from hf_controller.groups.worker_group import WorkerGroup
from hf_protocols import ALL_TO_ALL, DP, ONE_TO_ALL, ParallelSpec, RewardError, Topology, register

__all__ = ["Fragile", "build"]


class Fragile(Worker):
    """Fails on the rank that a call names, or on all."""

    @register(protocol=DP)
    def echo(self, batch: TensorDict) -> TensorDict:
        """The batch."""
        return batch.clone()

    @register(protocol=ONE_TO_ALL, returns="object")
    def pid(self) -> int:
        """Of the rank's process."""
        return os.getpid()

    @register(protocol=ONE_TO_ALL, returns="object")
    def sleep_on(self, rank: int, seconds: float) -> int:
        """Sleep on one rank."""
        if self.context.rank == rank:
            time.sleep(seconds)
        return rank

    @register(protocol=ONE_TO_ALL, returns="object")
    def raise_on_all(self) -> None:
        """An exception of every rank's own."""
        raise KeyError(f"rank {self.context.rank}")

    @register(protocol=ALL_TO_ALL, returns="object")
    def say(self, text: str) -> None:
        """Print this rank's text."""
        print(text)  # noqa: T201 - what is printed is what is looked at

    @register(protocol=ONE_TO_ALL, returns="object")
    def meet(self, but: int | None = None, how: str | None = None) -> float:
        """A collective, which one rank leaves."""
        if self.context.rank == but:
            if how == "raise":
                raise RewardError("rank left the collective")
            time.sleep(1.0)  # another thread of Ray still sends the answer of the call before
            os._exit(3)
        total = torch.ones(())
        torch.distributed.all_reduce(total)
        return total.item()


def build(executor: Executor, pool: ResourcePool) -> WorkerGroup:
    """The worker on two ranks."""
    spec = WorkerSpec(worker=Fragile, topology=Topology(ParallelSpec(dp_size=2)))
    return executor.build_groups(pool, {"fragile": spec})["fragile"]
