from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from hf_mapper import ClusterSpec, MachineSpec, WorkloadSpec, find_smallest_cluster, gpu, is_feasible, map_dataflow
from hf_protocols import Dataflow, ModelShape, PlanError


@pytest.mark.parametrize(
    ("algorithm", "model"), [("ppo", "llama-2-7b"), ("remax", "llama-2-70b"), ("grpo", "llama-3-8b")]
)
def test_the_smallest_cluster_is_where_counting_up_first_fits(
    paper_problem: Callable[..., Any], algorithm: str, model: str
) -> None:
    problem = paper_problem(algorithm, model, 8)
    found = find_smallest_cluster(*problem)
    assert found is not None
    for count in range(1, found.num_machines + 1):
        cluster = dataclasses.replace(
            problem.cluster, machines=(dataclasses.replace(problem.cluster.machine, num_machines=count),)
        )
        assert is_feasible(*problem._replace(cluster=cluster)) == (count == found.num_machines)


def test_of_two_kinds_the_one_that_needs_fewer_devices_is_named(paper_problem: Callable[..., Any]) -> None:
    problem = paper_problem("ppo", "llama-2-70b", 8)
    kinds = (MachineSpec(gpu=gpu("a100-40"), num_gpus=8), MachineSpec(gpu=gpu("mi300x"), num_gpus=8))
    mixed = ClusterSpec(machines=kinds, inter_bandwidth_bytes_per_s=25e9)
    with pytest.raises(PlanError, match="smallest cluster that would do is 2 machines of 8 x mi300x"):
        map_dataflow(*problem._replace(cluster=mixed))


def test_a_single_machine_without_a_network_is_grown_too(tiny: ModelShape) -> None:
    models = dict.fromkeys(("actor", "critic", "reference"), tiny)
    workload = WorkloadSpec(global_batch=64, prompt_tokens=16, response_tokens=16, micro_batch_tokens=32)
    small = ClusterSpec.host(1, 12_000_000)
    found = find_smallest_cluster(Dataflow.preset("ppo"), models, small, workload)
    assert found is not None
    assert found.num_machines > 1
    with pytest.raises(PlanError, match=f"would do is {found.num_machines} machines of 1 x cpu"):
        map_dataflow(Dataflow.preset("ppo"), models, small, workload)


def test_what_never_fits_says_so(tiny: ModelShape) -> None:
    models = dict.fromkeys(("actor", "critic", "reference"), tiny)
    workload = WorkloadSpec(global_batch=1, prompt_tokens=16, response_tokens=16)
    tiny_slots = ClusterSpec.host(2, 2_000_000)
    assert find_smallest_cluster(Dataflow.preset("ppo"), models, tiny_slots, workload) is None
    with pytest.raises(PlanError, match=r"No number of such machines up to 2048 devices would do"):
        map_dataflow(Dataflow.preset("ppo"), models, tiny_slots, workload)
