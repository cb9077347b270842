"""Weights move between worker groups, whose ranks are of two default process groups."""

from __future__ import annotations

import pytest
import torch

from hf_controller import RayExecutor, ResourcePool, Worker, WorkerSpec, connect
from hf_engine import WeightLayout, WeightSync, fsdp_layout, replicated_layout
from hf_protocols import ONE_TO_ALL, ParallelSpec, ReshardError, Topology, register

SHAPES = {"w": (7, 2)}
WEIGHTS = torch.arange(14.0).view(7, 2)


class Trainer(Worker):
    @register(protocol=ONE_TO_ALL, returns="object")
    def send(self, version: int) -> None:
        layout, rank = fsdp_layout(SHAPES, range(2)), self.context.rank
        sync = self.sync_of(layout, "source")
        ((box,),) = layout.boxes_of(rank).values()
        sync.send({"w": WEIGHTS[box.offset[0] :][: box.shape[0]] + version}, version=version)

    def sync_of(self, layout: WeightLayout, side: str) -> WeightSync:
        if not hasattr(self, "_sync"):
            self._sync = WeightSync(layout, side=side, group=self.context.connections["weights"].group)
        return self._sync


class Sampler(Trainer):
    @register(protocol=ONE_TO_ALL, returns="object")
    def receive(self, expected: int) -> list[list[float]]:
        found = torch.zeros(7, 2)
        sync = self.sync_of(replicated_layout(SHAPES, range(2)), "target")
        assert sync.receive({"w": found}, version=expected) == expected
        return found.tolist()


def test_weights_reach_the_ranks_of_another_group() -> None:
    with RayExecutor(num_cpus=4, object_store_bytes=100 * 2**20, call_timeout_s=60.0) as executor:
        spec = Topology(ParallelSpec(dp_size=2))
        trainers, samplers = (
            executor.build_groups(
                ResourcePool([2], device="cpu", name=role), {role: WorkerSpec(worker=worker, topology=spec)}
            )[role]
            for role, worker in (("trainer", Trainer), ("sampler", Sampler))
        )
        connect(trainers, samplers, name="weights")
        for version in (1, 2):
            sent, received = trainers.send(version), samplers.receive(version)
            assert received.result() == [(WEIGHTS + version).tolist()] * 2
            sent.result()
        sent, received = trainers.send(3), samplers.receive(4)
        with pytest.raises(ReshardError, match=r"rank [23] expected weights of version 4 and received \{0: 3"):
            received.result()
        with pytest.raises(ReshardError, match="another rank refused what it received"):
            sent.result()
