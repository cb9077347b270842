"""One process has one default process group: that of a single rank, or what stands in for one of several."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from hf_controller import InProcessExecutor, ResourcePool, Worker, WorkerSpec
from hf_protocols import DP, ParallelSpec, PoolError, ProtocolError, Topology, register


class Joining(Worker):
    @register(protocol=DP)
    def echo(self, batch):
        return batch


class Alone(Joining):
    needs_process_group = False


def spec(worker, ranks):
    return WorkerSpec(worker=worker, topology=Topology(ParallelSpec(dp_size=ranks)))


def pool(ranks):
    return ResourcePool([ranks], device="cpu")


def test_a_larger_group_stands_beside_groups_of_one_rank_without_a_default_group():
    with InProcessExecutor() as executor:
        larger = executor.build_groups(pool(2), {"larger": spec(Joining, 2)})["larger"]
        one = pool(1)
        with pytest.raises(ProtocolError, match=r"^trained on one rank cannot .* with larger on several: set needs_"):
            executor.build_groups(one, {"trained": spec(Joining, 1), "still": spec(Alone, 1)})
        still = executor.build_groups(one, {"still": spec(Alone, 1)})["still"]
        assert still.echo(larger.echo(TensorDict({"x": torch.zeros(2)}, batch_size=[2]))).num_rows == 2
        with pytest.raises(PoolError, match=r"^wide has 2 rank\(s\) .*, pool 'pool' has 1 slot\(s\): make them equal"):
            executor.build_groups(one, {"wide": spec(Joining, 2)})


def test_a_larger_group_is_refused_beside_a_default_group_with_the_knob():
    with InProcessExecutor() as executor:
        executor.build_groups(pool(1), {"trained": spec(Joining, 1)})
        knob = "groups of one rank make: set needs_process_group = False in their worker classes"
        with pytest.raises(ProtocolError, match=f"rank 0 of 2 cannot run beside a default process group .* {knob}"):
            executor.build_groups(pool(2), {"larger": spec(Joining, 2)})
