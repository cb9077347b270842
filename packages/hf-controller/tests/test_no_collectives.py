"""One process has one default process group: that of a single rank, or what stands in for one of several."""

from __future__ import annotations

import sys

import pytest
import torch
from tensordict import TensorDict

from hf_controller import InProcessExecutor, RemoteCallError, ResourcePool, Worker, WorkerSpec
from hf_protocols import DP, THREE_D, ParallelSpec, PoolError, ProtocolError, Topology, register


class JoiningWorker(Worker):
    @register(protocol=DP)
    def echo(self, batch):
        return batch


class Alone(JoiningWorker):
    needs_process_group = False


def spec(worker, ranks):
    return WorkerSpec(worker=worker, topology=Topology(ParallelSpec(dp_size=ranks)))


def pool(ranks):
    return ResourcePool([ranks], device="cpu")


def test_a_larger_group_allows_one_rank_without_a_default_group():
    with InProcessExecutor() as executor:
        larger = executor.build_groups(pool(2), {"larger": spec(JoiningWorker, 2)})["larger"]
        one = pool(1)
        with pytest.raises(ProtocolError, match=r"^trained on one rank cannot .* larger on several ranks\. Set needs_"):
            executor.build_groups(one, {"trained": spec(JoiningWorker, 1), "still": spec(Alone, 1)})
        still = executor.build_groups(one, {"still": spec(Alone, 1)})["still"]
        assert still.echo(larger.echo(TensorDict({"x": torch.zeros(2)}, batch_size=[2]))).num_rows == 2
        with pytest.raises(PoolError, match=r"^wide has 2 rank\(s\) .*, pool 'pool' has 1 slot\(s\). Make them equal"):
            executor.build_groups(one, {"wide": spec(JoiningWorker, 2)})


def test_calls_leave_the_programs_tracebacks_as_they_are():
    before = sys.excepthook
    with InProcessExecutor() as executor:
        larger = executor.build_groups(pool(2), {"larger": spec(JoiningWorker, 2)})["larger"]
        larger.echo(TensorDict({"x": torch.zeros(2)}, batch_size=[2])).result()
    with InProcessExecutor() as executor:
        executor.build_groups(pool(1), {"trained": spec(JoiningWorker, 1)})
    assert sys.excepthook is before


def test_refusing_a_larger_group_names_needs_process_group():
    with InProcessExecutor() as executor:
        executor.build_groups(pool(1), {"trained": spec(JoiningWorker, 1)})
        knob = r"groups of one rank make\. Set needs_process_group = False in their worker classes"
        with pytest.raises(ProtocolError, match=f"rank 0 of 2 cannot run in .* has a default process group.* {knob}"):
            executor.build_groups(pool(2), {"larger": spec(JoiningWorker, 2)})


BATCH = TensorDict({"x": torch.ones(2)}, batch_size=[2])


class Stages(Worker):
    """Two pipeline stages, of which the last one's rows are collected."""

    needs_process_group = False

    @register(protocol=THREE_D)
    def double(self, batch, fails_on):
        if self.context.rank == fails_on:
            raise KeyError(f"on {fails_on}")
        return TensorDict({"x": batch["x"] * 2}, batch_size=batch.batch_size)


def test_every_rank_of_a_call_runs_even_if_others_fail():
    stages_spec = WorkerSpec(worker=Stages, topology=Topology(ParallelSpec(pp_size=2)))
    with InProcessExecutor() as executor:
        stages = executor.build_groups(pool(2), {"stages": stages_spec})["stages"]
        first, last = (stages.double(BATCH, fails_on=rank) for rank in range(2))
        with pytest.raises(RemoteCallError, match=r"^stages\.double on rank 0 failed: KeyError: 'on 0'"):
            first.result()
        # Its rows are there all the same, for their readers; those of the rank that is collected are not.
        assert stages.double(first, fails_on=None).result()["x"].tolist() == (BATCH["x"] * 4).tolist()
        with pytest.raises(RemoteCallError, match=r"^stages\.double on rank 1 failed: KeyError: 'on 1'"):
            stages.double(last, fails_on=None).result()
