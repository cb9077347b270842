"""Rows between models and offloaded models: bytes by the transfer protocols' own routes, seconds by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from hf_mapper import ClusterSpec, MachineSpec, WorkloadSpec, gpu, map_dataflow, read_placement, simulate_placement
from hf_mapper.search.movement import count_swaps, transfer_call_s
from hf_mapper.simulators.transfer import CallRows, count_call_rows, simulate_offload, simulate_transfer
from hf_protocols import (
    THREE_D,
    THREE_D_ALL_MICRO_DP,
    ConfigError,
    Dataflow,
    GenerationSpec,
    ModelCall,
    ModelShape,
    ParallelSpec,
    PlanError,
    Topology,
)

WORKLOAD = WorkloadSpec(global_batch=24, samples_per_prompt=2, prompt_tokens=10, response_tokens=100, epochs=3)
HOST = gpu("a100-80").host_bandwidth_bytes_per_s
NETWORK = 1e9


def cluster(*, num_machines: int = 2, network: float | None = NETWORK, host_memory_bytes: int = 0) -> ClusterSpec:
    machine = MachineSpec(
        gpu=gpu("a100-80"), num_gpus=4, num_machines=num_machines, host_memory_bytes=host_memory_bytes
    )
    return ClusterSpec(
        machines=(machine,), inter_bandwidth_bytes_per_s=network, inter_latency_s=1e-12, link_efficiency=1.0
    )


def test_columns_have_their_sizes() -> None:
    flow = Dataflow.preset("ppo").with_models(["reward"])
    calls = {call.method: call for call in flow.calls}
    rows = {method: count_call_rows(call, WORKLOAD) for method, call in calls.items()}
    sequence = 8 * 10 + (8 + 1) * 100
    # row number and prompt in, for each prompt once; ids, mask, log-probs, reason and version out, for each sample
    assert rows["generate_sequences"] == CallRows(
        read_bytes=24 * (8 + 80), written_bytes=48 * ((8 + 1 + 4) * 100 + 8 + 8)
    )
    assert rows["compute_values"] == CallRows(read_bytes=48 * sequence, written_bytes=48 * 400)
    # no mask, but the answer and the reason of the end
    assert rows["compute_reward"] == CallRows(read_bytes=48 * (sequence - 100 + 8 + 8), written_bytes=48 * 8)
    assert rows["compute_advantages"] == CallRows()
    assert rows["update_critic"] == CallRows(read_bytes=3 * 48 * (sequence + 800))


def test_columns_that_may_lack_count_as_if_they_were_there() -> None:
    (call,) = (call for call in Dataflow.preset("ppo").calls if call.method == "compute_values")
    marked = dataclasses.replace(call, reads=tuple(f"{name}?" for name in call.reads))
    assert count_call_rows(marked, WORKLOAD) == count_call_rows(call, WORKLOAD)


def test_columns_of_a_second_generation_have_the_same_sizes() -> None:
    first, second = (call for call in Dataflow.preset("remax").calls if call.kind == "generation")
    assert count_call_rows(second, WORKLOAD) == count_call_rows(first, WORKLOAD)


def test_lengths_that_vary_count_as_their_mean() -> None:
    (call,) = (call for call in Dataflow.preset("ppo").calls if call.method == "compute_values")
    ragged = dataclasses.replace(WORKLOAD, response_lengths=(20, 100))
    assert count_call_rows(call, ragged) == count_call_rows(call, dataclasses.replace(WORKLOAD, response_tokens=60))


@pytest.mark.parametrize("layout", ["1-1-8", "1-4-2", "2-2-2", "1-2-2", "1-1-3", "4-1-1"])
def test_ranks_and_machines_move_what_the_protocols_route(layout: str) -> None:
    """An inference call, its link to the host or its network so slow that only that part counts."""
    spec = ParallelSpec.parse(layout)
    topology, rows = Topology(spec), CallRows(read_bytes=48 * 7.0, written_bytes=48 * 5.0)
    taken = [7.0 * len(rows) for rows in THREE_D.distribute(topology, 48)]
    writers = THREE_D.collect(topology).ranks
    given = [48 / spec.dp_size * 5.0 * (rank in writers) for rank in range(spec.world_size)]
    busiest = max(one + other for one, other in zip(taken, given, strict=True))
    alone = transfer_call_s("inference", rows, cluster(num_machines=1, network=None), spec, None)
    assert alone == pytest.approx(busiest / HOST)
    # A machine has four ranks; those that write are spread over them evenly, as a mean over the machines.
    machines = max(1.0, spec.world_size / 4)
    together = transfer_call_s("inference", rows, cluster(), spec, None)
    members = min(4, spec.world_size)
    moved = members * max(taken) + sum(given) / machines
    assert together - alone == pytest.approx(moved / NETWORK, abs=1e-11)


def test_prompts_are_shared_by_generation_replicas() -> None:
    spec, generation = ParallelSpec.parse("1-4-2"), GenerationSpec(gen_tp_size=2)
    topology, rows = Topology(spec, generation), CallRows(read_bytes=24 * 7.0)
    (taken,) = {7.0 * len(share) for share in THREE_D_ALL_MICRO_DP.distribute(topology, 24)}
    found = transfer_call_s("generation", rows, cluster(num_machines=1, network=None), spec, generation)
    assert found == pytest.approx(taken / HOST)


def test_nothing_to_move_takes_no_time() -> None:
    assert simulate_transfer(CallRows(), cluster(), num_ranks=8, num_shares=2) == 0
    assert simulate_offload(0.0, cluster(), num_swaps=3) == 0


def test_a_swap_is_there_and_back_for_every_update() -> None:
    assert simulate_offload(HOST, cluster(), num_swaps=3) == pytest.approx(6.0)
    workload = dataclasses.replace(WORKLOAD, mini_batches=4)
    kinds = ("training", "inference", "generation", "function")
    assert [count_swaps(kind, workload) for kind in kinds] == [12, 1, 1, 0]


def with_host_memory(problem: Any, host_memory_bytes: int) -> Any:
    machine = dataclasses.replace(problem.cluster.machine, host_memory_bytes=host_memory_bytes)
    return problem._replace(cluster=dataclasses.replace(problem.cluster, machines=(machine,)))


def test_models_are_offloaded_only_if_memory_is_short(paper_problem: Callable[..., Any]) -> None:
    """13B PPO needs 16 GPUs (the paper's smallest cluster); with host memory, 8 will do, and 16 do not use it."""
    problem = paper_problem("ppo", "llama-2-13b", 8)
    with pytest.raises(PlanError, match="raise host_memory_bytes of the machines in a problem"):
        map_dataflow(*problem)
    plan = map_dataflow(*with_host_memory(problem, 2 * 10**12))
    assert any(model.offload for model in plan.models.values())
    for model in plan.estimates.models.values():
        assert (model.host_bytes > 0) == (model.state_bytes == 0)
    roomy = with_host_memory(paper_problem("ppo", "llama-2-7b", 64), 2 * 10**12)
    assert map_dataflow(*roomy) == map_dataflow(*paper_problem("ppo", "llama-2-7b", 64))


def test_offloaded_models_share_the_host_memory(paper_problem: Callable[..., Any]) -> None:
    """34B PPO on 16 GPUs has to offload actor and critic, each of which would fit into a little less than both need."""
    problem = with_host_memory(paper_problem("ppo", "codellama-34b", 16), 2 * 10**12)
    plenty = map_dataflow(*problem).estimates.models
    held = [8 * plenty[role].host_bytes for role in ("actor", "critic")]
    plan = map_dataflow(*with_host_memory(problem, int(sum(held)) + 1))
    assert [role for role, model in plan.models.items() if model.offload] == ["actor", "critic"]
    assert [8 * plan.estimates.models[role].host_bytes for role in ("actor", "critic")] == held
    less = int(0.97 * sum(held))  # other layouts save a hundredth
    assert max(held) < less
    with pytest.raises(PlanError, match="no placement of actor codellama-34b"):
        map_dataflow(*with_host_memory(problem, less))


def test_a_plan_that_offloads_simulates_to_its_own_estimates(paper_problem: Callable[..., Any]) -> None:
    problem = with_host_memory(paper_problem("ppo", "llama-2-13b", 8), 2 * 10**12)
    plan = map_dataflow(*problem)
    found = simulate_placement(*problem, read_placement(plan))
    assert found.plan.models == plan.models
    assert found.iteration_s == pytest.approx(plan.estimates.iteration_s, rel=1e-12)
    largest = max(call.memory_bytes for call in found.calls)
    assert largest == pytest.approx(max(pool.memory_bytes for pool in plan.estimates.pools.values()))
    assert sum(call.breakdown["offload_s"] for call in found.calls) > 0
    assert all(call.breakdown["transfer_s"] > 0 for call in found.calls)
    with pytest.raises(PlanError, match="offload on machines without host_memory_bytes"):
        simulate_placement(*with_host_memory(problem, 0), read_placement(plan))


def test_one_machine_has_no_network_to_others() -> None:
    several = cluster(num_machines=2)
    assert several.only(0) == several
    assert cluster(num_machines=1).only(0) == cluster(num_machines=1, network=None)
    kinds = dataclasses.replace(several, machines=cluster(num_machines=1).machines * 2)
    assert kinds.only(1).inter_bandwidth_bytes_per_s == NETWORK


def test_a_host_slot_has_no_other_memory(tiny: ModelShape) -> None:
    host = ClusterSpec.host(2, 2**30).machine
    assert dataclasses.replace(host, host_memory_bytes=2**40).offload_bytes == 0


def test_host_memory_is_a_whole_number_of_bytes() -> None:
    for wrong in (-1, 0.5, True):
        with pytest.raises(ConfigError, match=f"host_memory_bytes={wrong} must be a whole number of at least 0"):
            cluster(host_memory_bytes=wrong)  # type: ignore[arg-type]


def test_transfer_counts_an_unknown_column_once_per_token() -> None:
    call = ModelCall(role="own", method="weigh", kind="inference", reads=("prompt_ids",), writes=("token_weights",))
    assert count_call_rows(call, WORKLOAD) == CallRows(read_bytes=48 * 80, written_bytes=48 * 400)
