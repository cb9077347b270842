from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hf_mapper import WorkloadSpec
from hf_mapper.search.demand import build_demands, group_functions, number_demands
from hf_protocols import ConfigError, Dataflow, ModelCall, ModelShape, PlanError

WORKLOAD = WorkloadSpec(global_batch=8, prompt_tokens=8, response_tokens=8)


def test_ppo_asks_each_model_for_its_calls(tiny: ModelShape) -> None:
    models = dict.fromkeys(("actor", "critic", "reference"), tiny)
    demands = build_demands(Dataflow.preset("ppo"), models, WORKLOAD)
    assert {role: demand.calls for role, demand in demands.items()} == {
        "actor": (("generation",), ("inference",), (), ("training",)),
        "critic": ((), ("inference",), (), ("training",)),
        "reference": ((), ("inference",), (), ()),
    }
    assert [demand.trained for demand in demands.values()] == [True, True, False]
    assert [demand.generates for demand in demands.values()] == [True, False, False]
    assert group_functions(Dataflow.preset("ppo"), models) == (("reward", "advantage"),)


def test_functions_of_one_stage_share_no_slot(tiny: ModelShape) -> None:
    models = dict.fromkeys(("actor", "critic", "cost_critic", "reference"), tiny)
    dataflow = Dataflow.preset("safe_rlhf")
    slots = group_functions(dataflow, models)
    assert slots == (("reward", "advantage"), ("cost",))
    assert sorted(role for slot in slots for role in slot) == sorted(set(dataflow.roles) - set(models))
    for calls in dataflow.stages():
        running = {call.role for call in calls}
        assert all(len(running.intersection(slot)) <= 1 for slot in slots)
    assert group_functions(dataflow, {**models, "reward": tiny}) == (("cost", "advantage"),)


def test_functions_that_wait_for_other_calls_share_no_slot(tiny: ModelShape) -> None:
    """A judge and a function of log-probs are in different stages, and neither waits for the other."""

    def function(role: str, reads: tuple[str, ...], writes: tuple[str, ...]) -> ModelCall:
        return ModelCall(role=role, method="compute", kind="function", reads=reads, writes=writes)

    def model(method: str, kind: Any, reads: tuple[str, ...], writes: tuple[str, ...]) -> ModelCall:
        return ModelCall(role="actor", method=method, kind=kind, reads=reads, writes=writes)

    calls = (
        model("generate", "generation", (), ("response_ids",)),
        model("score", "inference", ("response_ids",), ("logprobs",)),
        function("judge", ("response_ids",), ("scores",)),
        function("surprise", ("logprobs",), ("bonus",)),
        function("advantage", ("scores", "bonus?"), ("advantages",)),
        function("report", ("advantages",), ()),
    )
    slots = group_functions(Dataflow(name="own", calls=calls), {"actor": tiny})
    assert slots == (("judge", "advantage", "report"), ("surprise",))


def test_equal_demands_are_one(tiny: ModelShape) -> None:
    """A reward and a cost read and write alike; a reference, whose log-probs are longer than a score, does not."""
    models = dict.fromkeys(("actor", "critic", "reference", "reward", "cost"), tiny)
    demands = build_demands(Dataflow.preset("safe_rlhf_one_critic"), models, WORKLOAD)
    assert demands["reward"] == demands["cost"]
    numbered = number_demands(demands.values())
    assert numbered == [demands["reference"], demands["reward"], demands["critic"], demands["actor"]]


def test_a_role_that_the_dataflow_lacks_is_named(tiny: ModelShape) -> None:
    models = dict.fromkeys(("actor", "critic", "references"), tiny)
    with pytest.raises(ConfigError, match=r"dataflow 'ppo': role 'references' is unknown. Did you mean reference"):
        build_demands(Dataflow.preset("ppo"), models, WORKLOAD)


def test_a_trained_role_needs_a_model(tiny: ModelShape) -> None:
    with pytest.raises(PlanError, match=r"critic.update_critic is a training call\. Set models\['critic'\]"):
        build_demands(Dataflow.preset("ppo"), {"actor": tiny, "reference": tiny}, WORKLOAD)


def test_functions_alone_are_nothing_to_place() -> None:
    call = ModelCall(role="reward", method="compute_reward", kind="function", reads=())
    with pytest.raises(PlanError, match="no role has a ModelShape"):
        build_demands(Dataflow(name="own", calls=(call,)), {}, WORKLOAD)


def test_sequences_must_fit_the_models_positions(tiny: ModelShape) -> None:
    short = dataclasses.replace(tiny, max_positions=15)
    models = {"actor": tiny, "critic": short, "reference": tiny}
    with pytest.raises(ConfigError, match="critic: prompt_tokens \\+ response_tokens = 16 exceeds the 15 positions"):
        build_demands(Dataflow.preset("ppo"), models, WORKLOAD)
