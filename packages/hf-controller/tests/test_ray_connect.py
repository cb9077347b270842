"""Groups of other processes in one process group, and what a rank's process finds around it."""

from __future__ import annotations

import pytest

from hf_controller import InProcessExecutor, ResourcePool, WorkerSpec, connect
from hf_controller.testing import SoloWorker
from hf_protocols import ParallelSpec, ProtocolError, Topology


def test_two_groups_meet_in_collectives_and_keep_their_own(ray_stage):
    name = connect(ray_stage.two, ray_stage.three)
    assert name == "two-three"
    left, right = ray_stage.two.meet(name), ray_stage.three.meet(name)
    assert left.result() + right.result() == [(rank, 10.0, 104.0) for rank in range(5)]
    assert ray_stage.two.sum_of_ranks().result() == [1.0, 1.0]

    connect(ray_stage.three, ray_stage.solo, name="another")
    left, right = ray_stage.three.meet("another"), ray_stage.solo.meet("another")
    assert left.result() + right.result() == [(rank, 6.0, 103.0) for rank in range(4)]

    with pytest.raises(ProtocolError, match="two has a connection 'two-three' already"):
        connect(ray_stage.two, ray_stage.three)
    # Refused before any rank waits for others: the group whose name is free goes on.
    with pytest.raises(ProtocolError, match="two has a connection 'two-three' already"):
        connect(ray_stage.two, ray_stage.solo, name="two-three")
    assert ray_stage.solo.answer(1).result(20)["value"] == 1
    assert connect(ray_stage.solo, ray_stage.three, name="third") == "third"


def test_groups_that_share_processes_are_not_connected(ray_stage):
    with pytest.raises(ProtocolError, match="share their processes"):
        connect(ray_stage.two, ray_stage.sharded)


def test_groups_of_two_executors_are_not_connected(ray_stage):
    with InProcessExecutor() as executor:
        spec = WorkerSpec(worker=SoloWorker, topology=Topology(ParallelSpec()))
        alone, other = (
            executor.build_groups(ResourcePool([1], device="cpu"), {role: spec})[role] for role in ("alone", "other")
        )
        with pytest.raises(ProtocolError, match="different executors"):
            connect(ray_stage.two, alone)
        with pytest.raises(ProtocolError, match="cannot connect alone and other: use RayExecutor"):
            connect(alone, other)


def test_ranks_find_what_torchrun_would_set(ray_stage):
    expected = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "PROBE": "set"}
    found = ray_stage.two.environment().result()
    assert found == [{"RANK": str(rank), "LOCAL_RANK": str(rank), **expected} for rank in range(2)]
