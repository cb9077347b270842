"""Weights move between worker groups, whose ranks are of two default process groups."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from hf_controller import RayExecutor, ResourcePool, Worker, WorkerGroup, WorkerSpec, connect
from hf_engine import WeightSync, fsdp_layout, replicated_layout
from hf_engine.lost_peers import failures_end_all
from hf_engine.resharding.steps import Step
from hf_protocols import ONE_TO_ALL, ParallelSpec, ReshardError, Topology, register

SHAPES = {"w": (7, 2)}
WEIGHTS = torch.arange(14.0).view(7, 2)


class Side(Worker):
    """Makes its sync again where the groups were connected again."""

    @register(protocol=ONE_TO_ALL, returns="object")
    def use(self, name: str) -> None:
        self._sync = WeightSync(self.layout, side=self.side, group=self.context.connections[name].group)

    @register(protocol=ONE_TO_ALL, returns="object")
    def fail_on(self, rank: int | None, part: str) -> None:
        """From now on this rank of the side fails with its next bucket; None: none does."""
        if not hasattr(self, "_patch"):
            self._patch = pytest.MonkeyPatch()
        self._patch.undo()
        if rank == self.context.rank:
            self._patch.setattr(Step, part, _run_out)

    @register(protocol=ONE_TO_ALL, returns="object")
    def meet(self, failing: int) -> str:
        """In the side's own groups, where this rank fails; the others are in the joint group, or wait for them."""
        action = _run_out if self.context.rank == failing else self.move
        with pytest.raises((ReshardError, RuntimeError)) as failed, failures_end_all("nobody met"):
            action()
        return str(failed.value)

    @register(protocol=ONE_TO_ALL, returns="object")
    def sum_ranks(self) -> float:
        """Over the side's own default group."""
        summed = torch.tensor([float(self.context.rank)])
        dist.all_reduce(summed)
        return summed.item()


class Trainer(Side):
    side, layout = "source", fsdp_layout(SHAPES, range(2))

    @register(protocol=ONE_TO_ALL, returns="object")
    def send(self, version: int) -> None:
        ((box,),) = self.layout.boxes_of(self.context.rank).values()
        self._sync.send({"w": WEIGHTS[box.offset[0] :][: box.shape[0]] + version}, version=version)

    def move(self) -> None:
        self.send(9)


class Sampler(Side):
    side, layout = "target", replicated_layout(SHAPES, range(2))

    @register(protocol=ONE_TO_ALL, returns="object")
    def receive(self, expected: int) -> list[list[float]]:
        found = torch.zeros(7, 2)
        assert self._sync.receive({"w": found}, version=expected) == expected
        return found.tolist()

    def move(self) -> None:
        self.receive(9)


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
    with pytest.raises(ReshardError, match=r"rank [23] expected weights of version 4 and received \{0: 3"):
        received.result()
    with pytest.raises(ReshardError, match="another rank refused what it received"):
        sent.result()


@pytest.mark.parametrize(("failing", "rank", "part"), [(0, 1, "pack"), (1, 3, "unpack")], ids=["sender", "receiver"])
def test_a_failure_on_the_way_ends_the_joint_group_alone(
    sides: tuple[WorkerGroup, WorkerGroup], failing: int, rank: int, part: str
) -> None:
    """All ranks of both sides say who failed, as the joint group counts them, and why; then they are joined again."""
    join(sides, f"broken by {part}")
    trainers, samplers = sides
    check_that_weights_move(sides, 1)
    sides[failing].fail_on(1, part).result()
    for call in (trainers.send(2), samplers.receive(2)):
        with pytest.raises(ReshardError) as failed:
            call.result()
        reason = rf"rank {rank}(: | failed: RuntimeError: )no room for this bucket; the weights did not arrive"
        assert re.search(reason, str(failed.value))
        assert "The group that joins them cannot be used again: join the ranks again" in str(failed.value)
    sides[failing].fail_on(None, part).result()
    for side in sides:
        assert side.sum_ranks().result() == [1.0] * 2
    join(sides, f"joined after {part}")
    check_that_weights_move(sides, 1)


def test_a_failure_in_the_own_groups_ends_the_joint_one_too(sides: tuple[WorkerGroup, WorkerGroup]) -> None:
    """The own side starts again, whichever group its ranks were in; the other hears who failed. This ends the sides."""
    join(sides, "last")
    trainers, samplers = sides
    sent, met = trainers.send(9), samplers.meet(failing=1)
    waiting, failing = met.result()
    assert failing == "no room for this bucket"
    reason = "failed: RuntimeError: no room for this bucket; nobody met. The"
    assert waiting.startswith(
        f"the transfer of weights ended on rank 0: rank 1 {reason} process groups cannot be used again: start the ranks"
    )
    with pytest.raises(ReshardError, match=f"rank 3 {reason} group that joins them cannot"):
        sent.result()
