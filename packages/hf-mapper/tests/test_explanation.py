from __future__ import annotations

import dataclasses
import io
import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from hf_mapper import Explanation, MapperConfig, explain_plan, is_feasible, map_dataflow, render_explanation
from hf_mapper.explain.pricing import price_pools, stage_seconds
from hf_mapper.search.demand import build_demands
from hf_mapper.search.exact_search import find_pools
from hf_protocols import MappingPlan, ModelShape


@pytest.fixture(scope="module")
def build(paper_problem: Callable[..., Any]) -> Callable[..., MapperConfig]:
    return lambda *given: MapperConfig(**paper_problem(*given)._asdict())


@pytest.fixture(scope="module")
def whole(build: Callable[..., MapperConfig]) -> Explanation:
    """All that is said of a small problem."""
    return explain_plan(build("grpo", "llama-2-7b", 16))


@pytest.fixture(scope="module")
def of_ppo(build: Callable[..., MapperConfig]) -> Explanation:
    return explain_plan(build("ppo", "llama-2-7b", 16), robustness=False)


def test_every_class_is_compared_and_the_plan_leads(build: Callable[..., MapperConfig], of_ppo: Explanation) -> None:
    problem, found = build("ppo", "llama-2-7b", 16), of_ppo
    plan = map_dataflow(problem.dataflow, problem.models, problem.cluster, problem.workload)
    assert found.plan == plan
    assert found.tolerances == ()
    first, *others = found.alternatives
    assert first.chosen
    assert first.iteration_s == plan.estimates.iteration_s
    assert len(found.alternatives) == 15
    assert {frozenset(map(frozenset, entry.pools)) for entry in found.alternatives} == {
        frozenset(map(frozenset, partition)) for partition in every_partition(list(problem.models))
    }
    assert {entry.name for entry in found.alternatives} == {"", "colocate", "standalone", "split"}
    assert not any(entry.chosen for entry in others)
    assert all(entry.iteration_s is None or entry.iteration_s >= first.iteration_s for entry in others)


def every_partition(items: list[str]) -> list[list[list[str]]]:
    if not items:
        return [[]]
    first, *rest = items
    found = []
    for partition in every_partition(rest):
        found.append([[first], *partition])
        found += [[*partition[:at], [first, *members], *partition[at + 1 :]] for at, members in enumerate(partition)]
    return found


def test_idle_parts_and_reasons_follow_from_the_stages(of_ppo: Explanation) -> None:
    for entry in of_ppo.alternatives:
        if entry.idle_part is None:
            continue
        assert all(-1e-9 <= part < 1 for part in entry.idle_part)
        if len(entry.pools) == 1:
            assert entry.idle_part == pytest.approx((0.0,))
        elif not entry.chosen and "as fast" not in entry.reason:
            assert f"idle {100 * max(entry.idle_part):.0f} %" in entry.reason
            assert "longer" in entry.reason


def test_shortfall_names_missing_bytes_and_pool(build: Callable[..., MapperConfig]) -> None:
    """Memory of exactly what is said to be missing, and no less, makes the class fit: colocation of a small cluster."""
    problem = build("ppo", "llama-2-7b", 8)
    found = explain_plan(problem, robustness=False)
    short = [entry for entry in found.alternatives if entry.missing_bytes is not None]
    assert short
    for entry in short:
        assert f"out of memory by {entry.missing_bytes / 2**30:.1f} GiB in " in entry.reason
        assert entry.iteration_s is None
        for extra, fits in ((1.001, True), (0.999, False)):
            more = with_memory(problem, entry.missing_bytes * extra)
            again = explain_plan(more, robustness=False).alternatives
            same = next(
                other for other in again if set(map(frozenset, other.pools)) == set(map(frozenset, entry.pools))
            )
            assert (same.iteration_s is not None) == fits, entry


def with_memory(problem: MapperConfig, extra_usable_bytes: float) -> MapperConfig:
    machine = problem.cluster.machine
    extra = extra_usable_bytes / (1 - machine.gpu.efficiency.fragmentation)
    gpu = dataclasses.replace(machine.gpu, memory_bytes=int(machine.gpu.memory_bytes + extra))
    cluster = dataclasses.replace(problem.cluster, machines=(dataclasses.replace(machine, gpu=gpu),))
    return dataclasses.replace(problem, cluster=cluster)


def test_classes_with_more_pools_than_devices() -> None:
    from hf_mapper import ClusterSpec, WorkloadSpec
    from hf_protocols import Dataflow

    tiny = ModelShape(
        name="tiny", num_layers=2, hidden_size=64, intermediate_size=128, num_heads=2, num_kv_heads=2, head_dim=32,
        vocab_size=32, max_positions=64,
    )  # fmt: skip
    problem = MapperConfig(
        dataflow=Dataflow.preset("grpo"),
        models={"actor": tiny, "reference": tiny},
        cluster=ClusterSpec.host(1, 2**30),
        workload=WorkloadSpec(global_batch=4, prompt_tokens=8, response_tokens=8),
    )
    found = explain_plan(problem)
    assert [entry.reason for entry in found.alternatives] == [
        "the fastest",
        "2 pools find no place among 1 device",
    ]
    assert found.extensions == ()


def test_prices_without_scales_are_the_searchs_own(build: Callable[..., MapperConfig]) -> None:
    for algorithm in ("ppo", "remax", "safe_rlhf_one_critic", "grpo"):
        problem = build(algorithm, "llama-2-7b", 32)
        _, pools = find_pools(problem)
        demands = build_demands(problem.dataflow, problem.models, problem.workload)
        seconds = stage_seconds(price_pools(pools, demands, problem.cluster, problem.workload))
        np.testing.assert_allclose(seconds, [pool.option.stage_s for pool in pools], rtol=1e-12)


def test_bottleneck_is_the_longest_stage_and_its_resource(build: Callable[..., MapperConfig]) -> None:
    found = explain_plan(build("ppo", "llama-2-7b", 32), robustness=False)
    stages = found.plan.estimates.stages
    longest = max(range(len(stages)), key=lambda index: stages[index].latency_s)
    assert found.bottleneck.stage == longest
    assert found.bottleneck.calls == stages[longest].calls
    assert "+".join(found.bottleneck.pool) == stages[longest].waits_for
    assert found.bottleneck.resource in found.bottleneck.saved_s
    assert all(0 <= saved < found.plan.estimates.iteration_s for saved in found.bottleneck.saved_s.values())


def test_one_more_machine_is_a_search_on_the_larger_cluster(
    build: Callable[..., MapperConfig], of_ppo: Explanation
) -> None:
    (extension,) = of_ppo.extensions
    larger = build("ppo", "llama-2-7b", 24)
    plan = map_dataflow(larger.dataflow, larger.models, larger.cluster, larger.workload)
    assert extension.num_machines == 3
    assert extension.iteration_s == plan.estimates.iteration_s
    assert extension.idle_gpus == plan.estimates.idle_gpus


def test_a_stop_leaves_out_what_was_not_found_by_then(build: Callable[..., MapperConfig], whole: Explanation) -> None:
    """Asked once more each time: what is said is what the whole explanation says, less some of it."""
    problem = build("grpo", "llama-2-7b", 16)
    seen = set()
    for limit in (3, 10, 20, 40, 80, 160, 320, 10**9):
        asked = itertools.count()
        found = explain_plan(problem, lambda asked=asked, limit=limit: next(asked) >= limit)
        seen.add((len(found.alternatives), len(found.extensions), len(found.tolerances)))
        if found.plan.estimates.search.complete:
            assert found.plan == whole.plan
            assert set(found.alternatives) <= set(whole.alternatives)
            assert set(found.extensions) <= set(whole.extensions)
            assert set(found.tolerances) <= set(whole.tolerances)
        assert found.complete == (found == whole)
    assert len(seen) > 3
    assert found == whole


def test_text_and_json_hold_the_same_reasons(whole: Explanation) -> None:
    found = whole
    console = Console(width=120, record=True, file=io.StringIO())
    render_explanation(found, console)
    text = console.export_text()
    body = json.loads(found.to_json())
    assert MappingPlan.from_json(json.dumps(body["plan"])) == found.plan
    for entry in body["alternatives"]:
        assert "|".join("+".join(pool) for pool in entry["pools"]) in text.replace(" ", "")
    for entry in body["tolerances"]:
        assert entry["simulator"] in text
        assert 0 < entry["optimal_from"] <= 1 <= entry["optimal_to"]
    assert body["bottleneck"]["resource"] in text
    assert body["memory"]["optimal_from"] < 1 < body["memory"]["optimal_to"]
    assert "times the bytes" in text
    assert "One more machine of a100-80 (3 in all)" in text


def test_it_fits_a_terminal_of_80(build: Callable[..., MapperConfig]) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    render_explanation(explain_plan(build("safe_rlhf_one_critic", "llama-2-7b", 16), robustness=False), console)
    assert max(map(len, console.export_text().splitlines())) <= 80


def test_smallest_cluster_is_feasible_and_one_less_is_not(
    build: Callable[..., MapperConfig],
) -> None:
    from hf_mapper import find_smallest_cluster

    problem = build("ppo", "llama-2-70b", 8)
    given = (problem.dataflow, problem.models)
    smallest = find_smallest_cluster(*given, problem.cluster, problem.workload)
    assert smallest is not None
    for count, fits in ((smallest.num_machines, True), (smallest.num_machines - 1, False)):
        machine = dataclasses.replace(smallest, num_machines=count)
        cluster = dataclasses.replace(problem.cluster, machines=(machine,))
        assert is_feasible(*given, cluster, problem.workload) == fits
