from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from hf_engine import build_groups
from hf_engine.process_groups import (
    default_timeout,
    find_machines,
    is_alive,
    local_device,
    refuse_unused_devices,
    wait_for_device,
    world_group,
)
from hf_protocols import BackendError, ParallelSpec, Topology, TopologyError


def groups_of(spec, axis):
    topology = Topology(ParallelSpec.parse(spec))
    group = build_groups(topology, axis)
    members = tuple(dist.get_process_group_ranks(group))
    assert members == topology.group_of(axis, dist.get_rank())
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=group)
    assert float(total) == sum(members)
    return members


@pytest.mark.parametrize(("spec", "axis", "expected"), [("1-3-1", "tp", (0, 1, 2)), ("1-3-1", "dp", None)])
def test_groups_are_those_of_the_topology(ranks3, spec, axis, expected):
    found = ranks3.run(groups_of, spec, axis)
    assert found == ([expected] * 3 if expected else [(0,), (1,), (2,)])


def leave_early():
    store, last = dist.distributed_c10d._get_default_store(), dist.get_world_size() - 1
    if dist.get_rank() == last:
        time.sleep(1.0)
        store.set("the last rank", "came")
    group = build_groups(Topology(ParallelSpec(dp_size=dist.get_world_size())), "tp")
    assert store.check(["the last rank"])
    dist.destroy_process_group(group)


def test_no_rank_goes_on_while_another_still_connects(ranks3):
    """One that destroyed its group at once would close a connection that its peer is still making."""
    ranks3.run(leave_early)


def use_torchs_internals():
    world = world_group()
    group = build_groups(Topology(ParallelSpec(dp_size=dist.get_world_size())), "tp")
    found = [world is dist.group.WORLD, is_alive(world), is_alive(group), default_timeout().total_seconds()]
    dist.destroy_process_group(group)
    return [*found, is_alive(group)]


def test_internals_of_this_torch_are_known(ranks3):
    assert ranks3.run(use_torchs_internals) == [[True, True, True, 30.0, False]] * 3


def build_too_many():
    with pytest.raises(TopologyError, match="4 ranks, the default process group 3"):
        build_groups(Topology(ParallelSpec(dp_size=4)), "dp")


def test_the_topology_must_be_the_worlds(ranks3):
    ranks3.run(build_too_many)


def test_without_cuda_a_rank_is_on_the_cpu():
    assert local_device().type == ("cuda" if torch.cuda.is_available() else "cpu")


def find_machines_of_two():
    """Ranks 0 and 2 are on one machine, by what they say."""
    machine = f"machine-{dist.get_rank() % 2}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: machine)
        return find_machines()


def test_ranks_of_a_machine_have_its_name(ranks3):
    assert ranks3.run(find_machines_of_two) == [[[0, 2], [1]]] * 3


def choose_devices():
    """With CUDA as torch would say, a rank of a gloo group is on the host, and one of another group on its device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 4)
        patch.setattr(torch.cuda, "current_device", lambda: 3)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.delenv("LOCAL_RANK", raising=False)
        over_gloo = [str(local_device()), str(local_device(dist.new_group([0, 1, 2])))]
        wait_for_device()
        with pytest.raises(BackendError, match="backend 'vllm' computes on the CUDA devices that it sees"):
            refuse_unused_devices("vllm")
        patch.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:nccl")
        refuse_unused_devices("vllm")
        current = str(local_device())
        patch.setenv("LOCAL_RANK", str(dist.get_rank()))
        return [*over_gloo, current, str(local_device())]


def test_a_rank_is_on_the_device_that_its_group_reaches(ranks3):
    assert ranks3.run(choose_devices) == [["cpu", "cpu", "cuda:3", f"cuda:{rank}"] for rank in range(3)]


def test_a_rank_has_a_device_of_its_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert [local_device()] == chosen == [torch.device("cuda", 1)]
    for wrong in ("one", "-1", "", "2"):
        monkeypatch.setenv("LOCAL_RANK", wrong)
        with pytest.raises(TopologyError, match=f"LOCAL_RANK='{wrong}': .* has 2 CUDA devices"):
            local_device()
