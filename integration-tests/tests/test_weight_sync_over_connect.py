"""Weights move between worker groups, whose ranks are of two default process groups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hf_controller import RayExecutor, ResourcePool, Worker, WorkerGroup, WorkerSpec, connect
from hf_engine import WeightSync, fsdp_layout, replicated_layout
from hf_engine.resharding.steps import Step
from hf_protocols import ONE_TO_ALL, ParallelSpec, ReshardError, Topology, WorkerError, register

SHAPES = {"w": (7, 2)}
WEIGHTS = torch.arange(14.0).view(7, 2)


class SyncSide(Worker):
    """Makes its sync again where the groups were connected again."""

    @register(protocol=ONE_TO_ALL, returns="object")
    def use(self, name: str) -> None:
        self._sync = WeightSync(self.layout, side=self.side, group=self.context.connections[name].group)

    @register(protocol=ONE_TO_ALL, returns="object")
    def fail_on(self, rank: int, part: str) -> None:
        """From now on this rank of the side fails with its next bucket."""
        if rank == self.context.rank:
            setattr(Step, part, _run_out)


class Trainer(SyncSide):
    side, layout = "source", fsdp_layout(SHAPES, range(2))

    @register(protocol=ONE_TO_ALL, returns="object")
    def send(self, version: int) -> None:
        ((box,),) = self.layout.boxes_of(self.context.rank).values()
        self._sync.send({"w": WEIGHTS[box.offset[0] :][: box.shape[0]] + version}, version=version)


class Sampler(SyncSide):
    side, layout = "target", replicated_layout(SHAPES, range(2))

    @register(protocol=ONE_TO_ALL, returns="object")
    def receive(self, expected: int) -> list[list[float]]:
        found = torch.zeros(7, 2)
        assert self._sync.receive({"w": found}, version=expected) == expected
        return found.tolist()


def _run_out(*_: object) -> None:
    raise RuntimeError("no room for this bucket")


@pytest.fixture(scope="module")
def sides(cluster_address: str) -> Iterator[tuple[WorkerGroup, WorkerGroup]]:
    with RayExecutor(address=cluster_address, call_timeout_s=60.0) as executor:
        topology = Topology(ParallelSpec(dp_size=2))
        trainers, samplers = (
            executor.build_groups(
                ResourcePool([2], device="cpu", name=role), {role: WorkerSpec(worker=worker, topology=topology)}
            )[role]
            for role, worker in (("trainer", Trainer), ("sampler", Sampler))
        )
        yield trainers, samplers


def join(sides: tuple[WorkerGroup, WorkerGroup], name: str) -> None:
    connect(*sides, name=name)
    for made in [side.use(name) for side in sides]:
        made.result()


def check_that_weights_move(sides: tuple[WorkerGroup, WorkerGroup], version: int) -> None:
    trainers, samplers = sides
    sent, received = trainers.send(version), samplers.receive(version)
    assert received.result() == [(WEIGHTS + version).tolist()] * 2
    sent.result()


def test_weights_reach_the_ranks_of_another_group(sides: tuple[WorkerGroup, WorkerGroup]) -> None:
    join(sides, "weights")
    for version in (1, 2):
        check_that_weights_move(sides, version)
    trainers, samplers = sides
    sent, received = trainers.send(3), samplers.receive(4)
    with pytest.raises(
        ReshardError, match="versions of the weights: 3 on rank 0 and 1 more, 4 on rank 2 and 1 more; no"
    ):
        received.result()
    with pytest.raises(
        ReshardError, match="versions of the weights: 3 on rank 0 and 1 more, 4 on rank 2 and 1 more; no"
    ):
        sent.result()


def test_a_failure_on_the_way_ends_both_sides(sides: tuple[WorkerGroup, WorkerGroup]) -> None:
    """The other ranks wait for the one that failed: the controller ends them, and names it in both calls."""
    join(sides, "broken")
    trainers, samplers = sides
    trainers.fail_on(1, "pack").result()
    for call in (trainers.send(2), samplers.receive(2)):
        with pytest.raises(WorkerError, match=r"^trainer\.send on rank 1 failed: RuntimeError: no room"):
            call.result()
