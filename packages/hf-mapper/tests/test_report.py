from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from hf_mapper import map_dataflow, render_plan
from hf_protocols import GenerationSpec, MachinePlan, MappingPlan, ModelPlan, PlanError, PoolPlan


def printed(plan: MappingPlan, width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    render_plan(plan, console)
    return console.export_text()


@pytest.fixture
def plan(paper_problem: Callable[..., Any]) -> MappingPlan:
    return map_dataflow(*paper_problem("ppo", "llama-2-7b", 128))


def test_every_role_pool_and_call_is_shown(plan: MappingPlan) -> None:
    text = printed(plan)
    for role, model in plan.models.items():
        assert role in text
        assert model.pool in text
    for stage in plan.estimates.stages:
        assert all(call in text for call in stage.calls)
    assert "64 x a100-80 on 8 machines" in text
    assert f"iteration {plan.estimates.iteration_s:.3g} s" in text


def test_a_plan_that_was_read_back_looks_the_same(plan: MappingPlan) -> None:
    assert printed(MappingPlan.from_json(plan.to_json())) == printed(plan)


def test_it_fits_a_terminal_of_80(plan: MappingPlan) -> None:
    lines = printed(plan, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("1-1-64 megatron" in line for line in lines)


def test_a_stopped_search_and_idle_devices_are_said(paper_problem: Callable[..., Any]) -> None:
    problem = paper_problem("ppo", "llama-2-7b", 128)
    stopped = map_dataflow(*problem, lambda: True)
    gap = 100 * stopped.estimates.search.gap
    assert f"search stopped: the best so far, at most {gap:.2g} % from the best" in printed(stopped)
    idle = dataclasses.replace(stopped.estimates, idle_gpus=3)
    text = printed(dataclasses.replace(stopped, estimates=idle))
    assert "3 devices idle" in text


def test_a_plan_without_estimates_cannot_be_explained() -> None:
    pool = PoolPlan(name="actor", machines=(MachinePlan(gpu_kind="cpu", slots=1),))
    plan = MappingPlan(pools=(pool,), models={"actor": ModelPlan(pool="actor", backend="fsdp")})
    with pytest.raises(PlanError, match="lacks estimates"):
        printed(plan)


def test_the_bound_on_generation_layouts_is_said(paper_problem: Callable[..., Any]) -> None:
    dataflow, models, cluster, workload = paper_problem("ppo", "llama-2-7b", 16)
    said = []
    for largest in (workload.largest_generation, GenerationSpec(gen_pp_size=2, gen_tp_size=8), None):
        chosen = dataclasses.replace(workload, largest_generation=largest)
        text = " ".join(printed(map_dataflow(dataflow, models, cluster, chosen)).split())
        said.append(re.findall(r"generation layouts of at most .*", text))
    more = "(largest_generation of the workload)"
    assert said == [
        [f"generation layouts of at most 1-64, what the shipped engines run {more}"],
        [f"generation layouts of at most 2-8 {more}"],
        [],
    ]


def test_names_in_brackets_are_printed_as_they_are(plan: MappingPlan) -> None:
    first = dataclasses.replace(plan.estimates.stages[0], calls=("actor.[/b][red]x",))
    estimates = dataclasses.replace(plan.estimates, stages=(first, *plan.estimates.stages[1:]))
    assert "actor.[/b][red]x" in printed(dataclasses.replace(plan, estimates=estimates))
