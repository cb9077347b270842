from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from hf_protocols import (
    SCHEMA_VERSION,
    AdapterEstimate,
    ConfigError,
    GenerationSpec,
    MachinePlan,
    MappingPlan,
    ModelEstimate,
    ModelPlan,
    ParallelSpec,
    PlanError,
    PlanEstimates,
    PoolEstimate,
    PoolPlan,
    SearchEstimate,
    StageEstimate,
    TopologyError,
    load_plan,
)

GOLDEN = Path(__file__).parent / "golden" / "mapping_plan.json"

PLAN = MappingPlan(
    pools=(
        PoolPlan(name="main", machines=(MachinePlan(gpu_kind="a100-80gb", slots=8),) * 2),
        PoolPlan(name="scoring", machines=(MachinePlan(gpu_kind="l40s", slots=4),)),
        PoolPlan(name="advantage", machines=(MachinePlan(gpu_kind="cpu", slots=1),)),
    ),
    models={
        "actor": ModelPlan(
            pool="main",
            backend="megatron",
            train=ParallelSpec(pp_size=2, tp_size=4, dp_size=2),
            generation=GenerationSpec(gen_tp_size=2),
        ),
        "critic": ModelPlan(
            pool="main", backend="fsdp", train=ParallelSpec(dp_size=8, cp_size=2, ep_size=4), offload=True
        ),
        "reference": ModelPlan(pool="scoring", backend="fsdp", train=ParallelSpec(dp_size=4), micro_batch_tokens=16384),
        "advantage": ModelPlan(pool="advantage", backend="function"),
    },
    estimates=PlanEstimates(
        iteration_s=12.5,
        stages=(
            StageEstimate(calls=("actor.generate_sequences",), latency_s=12.5, waits_for="main"),
            StageEstimate(calls=("advantage.compute_advantages",), latency_s=0.0, waits_for=None),
        ),
        pools={"main": PoolEstimate(stage_s=(12.5, 0.0), memory_bytes=2.0**36, usable_bytes=2.0**37, machines="a100")},
        models={
            "actor": ModelEstimate(
                stage_s=(12.5, 0.0), state_bytes=2.0**35, work_bytes=2.0**34, host_bytes=0.0, generation_waves=2
            )
        },
        idle_gpus=3,
        search=SearchEstimate(complete=False, gap=0.25, placements_tried=7),
        largest_generation="1-8",
        adapters=AdapterEstimate(rank=16, parameters={"actor": 4096}),
    ),
)


def test_the_golden_file_is_what_a_plan_writes_and_reads() -> None:
    """An old plan keeps loading: a change of this file is a change of the schema version."""
    text = GOLDEN.read_text(encoding="utf-8")
    assert PLAN.to_json() == text
    assert MappingPlan.from_json(text) == PLAN
    assert json.loads(text)["schema_version"] == SCHEMA_VERSION == 1


def test_defaults_may_be_left_out_of_the_text() -> None:
    text = json.dumps(
        {
            "schema_version": 1,
            "pools": [{"name": "main", "machines": [{"gpu_kind": "cpu", "slots": 2}]}],
            "models": {"actor": {"pool": "main", "backend": "fsdp", "train": {"dp_size": 2}}},
        }
    )
    plan = MappingPlan.from_json(text)
    assert plan.models["actor"] == ModelPlan(pool="main", backend="fsdp", train=ParallelSpec(dp_size=2))
    assert plan.estimates is None
    assert json.loads(plan.to_json())["estimates"] == {}


def test_pools_and_roles_are_looked_up_by_name() -> None:
    assert PLAN.pool("main").num_slots == 16
    assert PLAN.roles_of("main") == ("actor", "critic")
    with pytest.raises(PlanError, match="no pool 'other': its pools are main, scoring, advantage"):
        PLAN.pool("other")


def test_any_mapping_of_models_makes_the_same_plan() -> None:
    plan = MappingPlan(pools=list(PLAN.pools), models=MappingProxyType(dict(PLAN.models)), estimates=PLAN.estimates)
    assert plan == PLAN
    assert plan.to_json() == PLAN.to_json()


@pytest.mark.parametrize("version", [0, 2, "1", None, True, 1.0])
def test_another_schema_version_is_refused_naming_both(version: object) -> None:
    body = {**json.loads(PLAN.to_json()), "schema_version": version}
    with pytest.raises(PlanError, match=rf"schema_version {version!r}, this release reads 1\. Regenerate the plan"):
        MappingPlan.from_json(json.dumps(body))


def test_a_plan_without_version_is_refused() -> None:
    body = json.loads(PLAN.to_json())
    del body["schema_version"]
    with pytest.raises(PlanError, match="schema_version None"):
        MappingPlan.from_json(json.dumps(body))


@pytest.mark.parametrize("text", ["", "{", "[]", "[1]", "3", '"plan"', "null", '{"schema_version": 1}'])
def test_text_that_is_not_a_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="not a mapping plan"):
        MappingPlan.from_json(text)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("extra",), 1),
        (("pools", 0, "size"), 1),
        (("pools", 0, "machines", 0, "gpu"), "h100"),
        (("pools", 0, "machines", 0, "slots"), "8"),
        (("models", "actor", "gpu"), 1),
        (("models", "actor", "train", "sp_size"), 1),
        (("models", "actor", "train"), "2-4-2"),
        (("models", "actor"), None),
        (("models", "actor", "offload"), "no"),
        (("models", "actor", "offload"), 0),
        (("models", "actor", "pool"), 1),
        (("models", "actor", "backend"), None),
        (("pools", 0, "name"), 1),
        (("pools", 0, "machines", 0, "gpu_kind"), 100),
    ],
)
def test_an_unknown_key_or_kind_of_value_is_refused(path: tuple[str | int, ...], value: object) -> None:
    body = json.loads(PLAN.to_json())
    inner: Any = body
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(PlanError, match=r"not a mapping plan|must be a whole number|a \w+'s \w+=.*. Use "):
        MappingPlan.from_json(json.dumps(body))


def make(machines: tuple[MachinePlan, ...] = (MachinePlan(gpu_kind="h100", slots=8),), **model: Any) -> MappingPlan:
    pool = PoolPlan(name="main", machines=machines)
    return MappingPlan(pools=(pool,), models={"actor": ModelPlan(**{"pool": "main", "backend": "fsdp", **model})})


def test_ranks_must_fill_the_pool() -> None:
    with pytest.raises(PlanError, match=r"actor has .* = 4 ranks, its pool 'main' has 8 slots. Make them equal"):
        make(train=ParallelSpec(dp_size=4))
    assert make(train=ParallelSpec(dp_size=4, cp_size=2)).pool("main").num_slots == 8


def test_a_model_names_a_pool_that_exists() -> None:
    with pytest.raises(PlanError, match="actor runs on pool 'side', which is none of main"):
        make(pool="side")


def test_pools_have_names_of_their_own() -> None:
    with pytest.raises(PlanError, match="two pools share a name among main, main"):
        MappingPlan(pools=(PLAN.pool("main"),) * 2, models={})


def test_values_that_cannot_run_are_refused() -> None:
    with pytest.raises(PlanError, match="slots=0 must be a whole number of at least 1"):
        MachinePlan(gpu_kind="h100", slots=0)
    with pytest.raises(PlanError, match="pool 'main' has no machines"):
        make(machines=())
    with pytest.raises(PlanError, match="micro_batch_tokens=0"):
        make(micro_batch_tokens=0)
    with pytest.raises(PlanError, match=r"^a model's offload='no'. Use true or false$"):
        make(offload="no")
    with pytest.raises(PlanError, match=r"^a model's train='1-8-1'. Use a ParallelSpec or None$"):
        make(train="1-8-1")
    with pytest.raises(TopologyError, match="8 ranks cannot be split into generation replicas"):
        make(train=ParallelSpec(dp_size=8), generation=GenerationSpec(gen_tp_size=3))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), {1, 2}])
def test_estimates_that_json_cannot_hold_are_refused(value: Any) -> None:
    plan = replace(PLAN, estimates=replace(PLAN.require_estimates(), iteration_s=value))
    with pytest.raises(PlanError, match="the plan's estimates do not fit into JSON"):
        plan.to_json()


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity"])
def test_what_to_json_refuses_is_not_read(name: str) -> None:
    text = replace(PLAN, estimates=replace(PLAN.require_estimates(), iteration_s=7.25)).to_json()
    with pytest.raises(PlanError, match=f"^{name} is not a number of JSON. Regenerate the plan"):
        MappingPlan.from_json(text.replace("7.25", name))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("pools",), {}, "pools={}. Use a list"),
        (("pools",), "x", "pools='x'. Use a list"),
        (("pools", 0), 3, r"pools\[0\]=3. Use an object"),
        (("pools", 0, "machines"), "ab", r"pools\[0\].machines='ab'. Use a list"),
        (("pools", 0, "machines", 0), 3, r"pools\[0\].machines\[0\]=3. Use an object"),
        (("pools", 0, "size"), 1, r"pools\[0\] has the key 'size', which is none of name, machines"),
        (("models",), [1], r"models=\[1\]. Use an object"),
        (("models", "actor"), 3, "models.actor=3. Use an object"),
        (("models", "actor", "gpu"), 1, "models.actor has the key 'gpu', which is none of pool, backend, train"),
        (("models", "actor", "train"), "2-4-2", "models.actor.train='2-4-2'. Use an object"),
        (
            ("models", "actor", "train"),
            {"sp_size": 1},
            "models.actor.train has the key 'sp_size', which is none of",
        ),
        (("models", "actor", "generation"), [1], r"models.actor.generation=\[1\]. Use an object"),
        (("models", "actor"), {"pool": "main"}, "models.actor lacks backend"),
        (("estimates",), 3, "estimates=3. Use an object"),
        (("extra",), 1, "the plan has the key 'extra', which is none of pools, models, estimates"),
        (("pools", 0, "machines", 0, "slots"), "8", r"pools\[0\].machines\[0\]: a machine's slots='8' must be a whole"),
        (("models", "actor", "offload"), "no", "models.actor: a model's offload='no'. Use true or false"),
        (("models", "actor", "train", "dp_size"), "2", "models.actor.train: dp_size='2' must be a whole number"),
        (("models", "critic", "train", "ep_size"), 3, "models.critic.train: ep_size=3 does not divide"),
        (("models", "actor", "generation", "gen_tp_size"), 3, "models.actor: 16 ranks cannot be split"),
    ],
)
def test_a_wrong_field_or_value_is_named_with_its_place(
    path: tuple[str | int, ...], value: object, message: str
) -> None:
    body = json.loads(PLAN.to_json())
    inner: Any = body
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(PlanError, match=f"^not a mapping plan: {message}"):
        MappingPlan.from_json(json.dumps(body))


def test_plans_are_made_of_plans() -> None:
    wrong: Any = 3
    with pytest.raises(PlanError, match=r"^a plan's pools=3. Use PoolPlans"):
        MappingPlan(pools=wrong, models={})
    with pytest.raises(PlanError, match=r"^a plan's pools=.*. Use PoolPlans"):
        MappingPlan(pools=(wrong,), models={})
    with pytest.raises(PlanError, match=r"^a plan's models=3. Use a mapping of roles to ModelPlans"):
        MappingPlan(pools=PLAN.pools, models=wrong)
    with pytest.raises(PlanError, match=r"^a plan's models=.*. Use a mapping of roles to ModelPlans"):
        MappingPlan(pools=PLAN.pools, models={"actor": wrong})
    with pytest.raises(PlanError, match=r"^a plan's estimates=3. Use PlanEstimates or None"):
        MappingPlan(pools=PLAN.pools, models={}, estimates=wrong)
    with pytest.raises(PlanError, match=r"^a plan's estimates=\{\}. Use PlanEstimates or None"):
        MappingPlan(pools=PLAN.pools, models={}, estimates={})  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"^the machines of pool 'main'=3. Use MachinePlans"):
        PoolPlan(name="main", machines=wrong)


def test_a_key_that_stands_twice_is_refused() -> None:
    with pytest.raises(PlanError, match="the key 'pools' stands twice"):
        MappingPlan.from_json('{"schema_version": 1, "pools": [], "models": {}, "pools": []}')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\xff", "can't decode byte 0xff"),
        ("[" * 200_000, "nests too deeply"),
        ('{"schema_version": ' + "1" * 5000 + "}", "limit .* for integer string conversion"),
        ('{"schema_version": 1, "estimates": {"a": 1e999}}', "1e999 is outside the range of a float"),
        ('{"schema_version": 1, "estimates": {"a": -1e999}}', "-1e999 is outside the range of a float"),
    ],
    ids=["bytes", "deep", "integer", "float", "negative"],
)
def test_text_that_cannot_be_held_is_refused(text: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        MappingPlan.from_json(text)


def test_a_plan_that_reports_has_estimates() -> None:
    assert PLAN.require_estimates() is PLAN.estimates
    with pytest.raises(PlanError, match=r"^this plan lacks estimates. Make it with map_dataflow"):
        make().require_estimates()


@pytest.mark.parametrize("role", [3, "", None])
def test_roles_of_a_plan_are_names(role: Any) -> None:
    with pytest.raises(PlanError, match=f"^a role of a plan's models={role!r}. Use a name$"):
        MappingPlan(pools=PLAN.pools, models={role: PLAN.models["advantage"]})


def test_a_model_that_generates_has_a_training_layout() -> None:
    with pytest.raises(PlanError, match=r"a model's generation=.* without train\. Set train to the layout of"):
        make(generation=GenerationSpec(gen_tp_size=7))


def test_a_file_that_is_not_a_plan_is_named(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(PLAN.to_json())
    assert load_plan(file) == PLAN
    file.write_bytes(PLAN.to_json().replace("main", "\udcff").encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"the plan \S*plan\.json is not UTF-8 text"):
        load_plan(file)
    file.write_text(PLAN.to_json().replace("main", "\\ud800"))
    with pytest.raises(PlanError, match=r"--plan \S*plan\.json: .* unpaired surrogate"):
        load_plan(file, "--plan")
    file.write_text('{"prompt": "1"}\n{"prompt": "2"}\n')
    says = r"^the plan \S*: is not a mapping plan: Extra data: .*\. Write one with `hybridflow plan CONFIG --json`$"
    with pytest.raises(PlanError, match=says):
        load_plan(file)
    with pytest.raises(ConfigError, match=r"plan\.json cannot be read"):
        load_plan(tmp_path / "absent" / "plan.json")
