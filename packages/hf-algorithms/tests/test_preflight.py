"""Checks before anything starts: rows, tokens, ranks, and every problem in one report."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from hf_algorithms.commands.quickstart import prepare_quickstart
from hf_algorithms.config import Config, WarmStartConfig, parse_config
from hf_algorithms.data import TextBlocks
from hf_algorithms.preflight import placement
from hf_algorithms.preflight.checks import check_run
from hf_algorithms.preflight.inputs import RunInputs, load_inputs
from hf_algorithms.preflight.placement import check_batches, check_plan
from hf_algorithms.preflight.walk import walk_calls
from hf_algorithms.recipes import Role
from hf_algorithms.run_directory import RunDirectory
from hf_algorithms.wiring import build_roles, build_sampling
from hf_controller import TracingExecutor, Worker
from hf_protocols import (
    THREE_D_ALL_MICRO_DP,
    BackendError,
    ConfigError,
    DataError,
    GenerationSpec,
    HybridFlowError,
    MachinePlan,
    MappingPlan,
    ModelPlan,
    ModelShape,
    ParallelSpec,
    PlanError,
    PoolPlan,
    read_machine_limits,
    register,
)
from hf_protocols.validation import show

BODY: dict[str, dict[str, Any]] = {
    "run": {"executor": "ray"},
    "model": {
        "tokenizer": "characters",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_layers": 1,
        "num_heads": 1,
        "max_positions": 32,
    },
    "warm_start": {"max_steps": 2, "batch_size": 8},
    "rollout": {"batch_size": 8, "max_new_tokens": 4},
}
PROMPTS = {"train": "1+1=", "validation": "22+22=", "test": "333+333="}


def write_rows(path: Path, prompts: list[str]) -> str:
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "2"}) + "\n" for prompt in prompts))
    return str(path)


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Config]:
    """A configuration with changes, whose data sets have these prompts."""

    def made(rows: dict[str, list[str]] | None = None, **changes: dict[str, Any]) -> Config:
        prompts = {name: [prompt] * 3 for name, prompt in PROMPTS.items()} | (rows or {})
        files = {name: write_rows(tmp_path / f"{name}.jsonl", given) for name, given in prompts.items() if given}
        body = {section: {**BODY.get(section, {}), **changes.get(section, {})} for section in {**BODY, **changes}}
        return parse_config({**body, "data": {**files, **changes.get("data", {})}})

    return made


def refusal(config: Config, plan: MappingPlan | None = None) -> HybridFlowError:
    with TemporaryDirectory() as folder, pytest.raises(HybridFlowError) as caught:
        check_run(config, Path(folder), plan=plan)
    return caught.value


def plan_of(ranks: int, *, reward_ranks: int = 1, tokens: int = 8192, **changes: Any) -> MappingPlan:
    """All models on `ranks` data-parallel ranks."""
    slots = {"models": ranks, "reward": reward_ranks, "advantage": 1}
    model = ModelPlan(pool="models", backend="fsdp", train=ParallelSpec(dp_size=ranks), micro_batch_tokens=tokens)
    model = dataclasses.replace(model, **changes)
    return MappingPlan(
        pools=tuple(PoolPlan(name=n, machines=(MachinePlan(gpu_kind="cpu", slots=s),)) for n, s in slots.items()),
        models={
            "actor": dataclasses.replace(model, generation=model.generation or GenerationSpec()),
            "critic": model,
            "reference": model,
            "reward": ModelPlan(pool="reward", backend="function", train=ParallelSpec(dp_size=reward_ranks)),
            "advantage": ModelPlan(pool="advantage", backend="function"),
        },
    )


def test_the_walk_has_every_call_with_its_rows(build: Callable[..., Config], tmp_path: Path) -> None:
    config = build(warm_start={"max_steps": 5, "batch_size": 6}, rollout={"samples_per_prompt": 2})
    inputs = load_inputs(config, tmp_path / "model")
    calls = walk_calls(config, plan_of(2), inputs)
    found = {(call.phase, f"{call.role}.{call.method}"): call for call in calls}
    assert found["warm start", "actor.update_actor"].num_rows == 6
    assert found["iterations", "actor.generate_sequences"].num_rows == 8
    assert found["iterations", "critic.update_critic"].num_rows == 16
    assert found["divergence", "reference.compute_ref_logprobs"].num_rows == 3
    assert {call.role for call in calls} == {"actor", "critic", "reference", "reward", "advantage"}
    longest = {phase: max(call.tokens.totals) for (phase, _), call in found.items()}
    assert longest == {"warm start": 6, "iterations": 8, "evaluation": 12, "divergence": 12}


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("num_rows", [1, 2, 4])
def test_evaluations_have_a_row_for_every_rank(
    build: Callable[..., Config], tmp_path: Path, ranks: int, num_rows: int
) -> None:
    few = {name: [PROMPTS[name]] * num_rows for name in ("validation", "test")}
    config = build(few, cluster={"gpus_per_machine": ranks})
    plan = plan_of(ranks, reward_ranks=3)
    inputs, found = check_run(config, tmp_path / "model", plan=plan)
    assert found == plan
    calls = walk_calls(config, plan, inputs)
    assert all(call.num_rows >= call.least_rows for call in calls)
    expected = {
        "generate_sequences": max(num_rows, ranks),
        "compute_reward": num_rows,  # on rank 0 alone
        "compute_metrics": num_rows,
    }
    divergence = {call.method: call.num_rows for call in calls if call.phase == "divergence"}
    assert {method: divergence[method] for method in expected} == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"warm_start": {"batch_size": 1}},
            "warm_start.batch_size = 1: 2 data-parallel ranks of the actor need at least 2 rows. Raise warm_start.b",
        ),
        (
            {"rollout": {"batch_size": 3}, "algorithm": {"mini_batches": 2}},
            "algorithm.mini_batches = 2 must divide rollout.batch_size * rollout.samples_per_prompt = 3",
        ),
        (
            {"rollout": {"batch_size": 3, "samples_per_prompt": 2}, "algorithm": {"name": "grpo", "mini_batches": 2}},
            "algorithm.mini_batches = 2 must divide rollout.batch_size = 3: with algorithm.name = 'grpo'",
        ),
        (
            {"rollout": {"batch_size": 8}, "algorithm": {"mini_batches": 16}},
            "algorithm.mini_batches = 16 must divide rollout.batch_size * rollout.samples_per_prompt = 8",
        ),
        (
            {"algorithm": {"name": "grpo", "group_of_one": "zero", "kl_coefficient": 0.0}},
            "algorithm.group_of_one = 'zero': with rollout.samples_per_prompt = 1 every advantage is 0 and nothing is ",
        ),
        (
            {"warm_start": {"stop_at": 0.9, "fail_above": 0.5}},
            "warm_start.stop_at = 0.9 is above warm_start.fail_above = 0.5",
        ),
    ],
)
def test_sizes_that_contradict_are_named_by_their_keys(
    build: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("hf_algorithms.preflight.checks.plan_placement", lambda *given, **options: plan_of(2))
    error = refusal(build(**changes))
    assert isinstance(error, ConfigError)
    assert str(error).startswith(message)


@pytest.mark.parametrize(
    ("rollout", "algorithm", "start"),
    [
        ({"batch_size": 2}, {}, "rollout.batch_size = 2: 4 generation replicas need at least 4 rows. Raise "),
        (
            {"batch_size": 4},
            {"mini_batches": 2},
            "rollout.batch_size * rollout.samples_per_prompt / algorithm.mini_batches = 2: 4 data-parallel ranks of",
        ),
    ],
)
def test_a_given_plan_with_more_ranks_than_rows(
    build: Callable[..., Config], rollout: dict[str, int], algorithm: dict[str, int], start: str
) -> None:
    config = build(rollout=rollout, algorithm=algorithm, cluster={"gpus_per_machine": 4})
    message = str(refusal(config, plan_of(4)))
    assert message.startswith(start)
    assert message.splitlines()[0].endswith("Raise rollout.batch_size, or use a plan with fewer ranks")


def test_more_prompts_than_rows_are_epochs(build: Callable[..., Config], tmp_path: Path) -> None:
    config = build(rollout={"batch_size": 64}, warm_start={"batch_size": 64})
    assert check_run(config, tmp_path / "model")[1].models["actor"].train is not None


CONTEXT = "model's context of 32 tokens"


@pytest.mark.parametrize("new", [32, 400])
def test_more_new_tokens_than_the_context(build: Callable[..., Config], new: int) -> None:
    assert str(refusal(build(rollout={"max_new_tokens": new}))) == (
        f"rollout.max_new_tokens = {new} exceeds the {CONTEXT}: a prompt and its response have together at most 32 "
        f"tokens. Lower rollout.max_new_tokens to at most 24, or raise model.max_positions to at least {new + 8}"
    )


@pytest.mark.parametrize("name", ["train", "validation", "test"])
def test_a_prompt_above_the_context_has_key_file_and_line(build: Callable[..., Config], name: str) -> None:
    config = build({name: ["1=", "2" * 29, "3" * 30]})
    line = (
        f"data.{name} = {show(getattr(config.data, name))}, line 3: its prompt of 30 tokens and a response of up to 4"
    )
    error = str(refusal(config))
    assert error.startswith(line)
    assert f"(rollout.max_new_tokens = 4) are 34 tokens, above the {CONTEXT}; so are 1 other rows" in error
    assert "Raise model.max_positions to at least 34, lower rollout.max_new_tokens to at most 2, shorten " in error


@pytest.mark.parametrize(("action", "lengths"), [("drop", [2, 28]), ("truncate_left", [2, 28, 28, 28])])
def test_longer_prompts_are_left_out_or_cut(
    build: Callable[..., Config], tmp_path: Path, action: str, lengths: list[int]
) -> None:
    rows = {"train": ["1=", "2" * 28, "3" * 29, "4" * 40]}
    inputs, _ = check_run(build(rows, data={"too_long": action}), tmp_path / "model")
    assert sorted(inputs.train.prompt_lengths) == lengths
    (note,) = [line for line in inputs.describe_data() if "too_long" in line]
    assert note.startswith("data.train = ")
    assert "2 of 4 prompts have more than 28 tokens (the longest has 40)" in note


def test_a_bound_on_prompts_is_the_users_own(build: Callable[..., Config], tmp_path: Path) -> None:
    error = str(refusal(build({"train": ["1=", "2222="]}, data={"max_prompt_tokens": 4})))
    assert "train.jsonl', line 2: its prompt has 5 tokens, more than data.max_prompt_tokens = 4" in error
    config = build({"train": ["1=", "2222="]}, data={"max_prompt_tokens": 4, "too_long": "drop"})
    with pytest.raises(
        DataError, match=r"test.* every prompt has more than 4 tokens, so data.too_long = 'drop' leaves"
    ):
        load_inputs(config, tmp_path / "model")


def test_texts_for_a_pretraining_loss_are_a_set_of_their_own(build: Callable[..., Config], tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "1+1=2"}\n{"text": "2"}\n')
    inputs = load_inputs(build(data={"pretraining": str(tmp_path / "texts.jsonl")}), tmp_path / "model")
    assert inputs.pretraining is not None
    assert isinstance(inputs.pretraining, TextBlocks)
    assert (inputs.pretraining.block_tokens, inputs.pretraining.text_lengths) == (32, [6, 2])
    assert f"data.pretraining = '{tmp_path}/texts.jsonl': 8 tokens in 1 blocks of at most 32 (data.block_tokens)" in (
        inputs.describe_data()
    )
    inputs = load_inputs(build(data={"pretraining": str(tmp_path / "texts.jsonl"), "block_tokens": 5}), tmp_path / "m")
    assert isinstance(inputs.pretraining, TextBlocks)
    assert len(inputs.pretraining) == 2
    error = str(refusal(build(data={"train": str(tmp_path / "texts.jsonl")})))
    assert "line 1 has a field 'text' and no prompt" in error


@pytest.mark.parametrize(
    ("name", "tokens", "budget", "says"),
    [
        ("texts", 33, 8192, "data.block_tokens = 33: exceeds the model's context of 32 tokens. Lower it to at most 32"),
        ("texts", 21, 20, "data.block_tokens = 21: exceeds training.micro_batch_tokens = 20. Lower it to at most 20"),
        ("texts", 2, 8192, "data.block_tokens = 2: a block of this tokenizer needs at least 3 tokens. Raise it"),
        ("train", 9, 8192, "data.block_tokens = 9: data.pretraining names no texts, and only texts are split into"),
        ("t*", None, 8192, "has texts, {folder}/train.jsonl prompts. Name files of one kind"),
    ],
)
def test_blocks_of_texts_that_cannot_be_are_one_line(
    build: Callable[..., Config], tmp_path: Path, name: str, tokens: int | None, budget: int, says: str
) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "1+1=2"}\n')
    data = {"pretraining": str(tmp_path / f"{name}.jsonl"), **({"block_tokens": tokens} if tokens else {})}
    config = build({"test": []}, data=data, training={"micro_batch_tokens": budget})
    assert says.replace("{folder}", str(tmp_path)) in str(refusal(config))


def test_blocks_fit_the_budget_of_a_given_plan(build: Callable[..., Config], tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "1+1=2"}\n')
    config = build({"test": []}, data={"pretraining": str(tmp_path / "texts.jsonl")}, warm_start={"max_steps": 0})
    check_run(config, tmp_path / "model", plan=plan_of(1, tokens=32))
    says = "data.block_tokens = 32: exceeds micro_batch_tokens = 31 of actor in the plan. Set it to at most 31"
    assert str(refusal(config, plan_of(1, tokens=31))) == says


@pytest.mark.parametrize(("samples", "fits"), [(1, 768), (4, 2048)])
def test_a_cache_has_room_for_the_longest_row(
    build: Callable[..., Config], tmp_path: Path, samples: int, fits: int
) -> None:
    """64 bytes a token: 12 tokens of a test row once, or 8 of a training row for every sample."""
    rollout = {"samples_per_prompt": samples}
    check_run(build(rollout={**rollout, "options": {"cache_bytes": fits}}), tmp_path / "model")
    error = str(refusal(build(rollout={**rollout, "options": {"cache_bytes": fits - 1}})))
    assert error.startswith(f"rollout.options.cache_bytes = {fits - 1}: a row of ")
    assert f"Raise it to at least {fits}" in error


def test_a_set_that_stands_in_for_another_is_named_once(build: Callable[..., Config]) -> None:
    error = str(refusal(build({"train": ["1" * 40], "validation": [], "test": []})))
    assert error.count("line 1:") == 1
    assert error.startswith("data.train = ")


def test_the_context_of_an_engine_is_its_own(build: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_algorithms.preflight.checks.check_rollout_options", lambda rollout: None)
    error = str(refusal(build(rollout={"options": {"max_positions": 8}})))
    assert "above rollout.options.max_positions = 8" in error
    assert "Raise rollout.options.max_positions to at least 12" in error


@pytest.mark.parametrize(
    ("rows", "fits", "who"),
    [
        ({}, 12, "data.test = "),
        ({"test": ["1="]}, 8, "data.train = "),  # validation rows are generated from, and go through no other pass
        ({"train": ["11111111="], "test": ["1="]}, 13, "data.train = "),
    ],
)
def test_a_row_above_the_token_budget_is_found_exactly(
    build: Callable[..., Config], tmp_path: Path, rows: dict[str, list[str]], fits: int, who: str
) -> None:
    check_run(build(rows, training={"micro_batch_tokens": fits}), tmp_path / "model")
    error = str(refusal(build(rows, training={"micro_batch_tokens": fits - 1})))
    assert error.startswith(who)
    assert f"above training.micro_batch_tokens = {fits - 1}" in error
    assert f"Raise training.micro_batch_tokens to at least {fits}" in error


def test_more_new_tokens_than_the_budget(build: Callable[..., Config]) -> None:
    error = str(refusal(build(rollout={"max_new_tokens": 20}, training={"micro_batch_tokens": 10})))
    assert error.startswith("rollout.max_new_tokens = 20 exceeds training.micro_batch_tokens = 10")
    assert "\n" not in error


def test_a_given_plan_has_budgets_of_its_own(build: Callable[..., Config], tmp_path: Path) -> None:
    plan = plan_of(1, tokens=12)
    config = build(training={"micro_batch_tokens": 1})
    check_run(config, tmp_path / "model", plan=plan)
    models = {**plan.models, "critic": dataclasses.replace(plan.models["critic"], micro_batch_tokens=7)}
    error = str(refusal(config, dataclasses.replace(plan, models=models)))
    assert error.startswith("data.train = ")
    assert "above micro_batch_tokens = 7 of critic in the plan" in error
    assert "data.test" not in error, "the critic sees no test rows"


def test_every_problem_is_reported_at_once(build: Callable[..., Config]) -> None:
    config = build(
        data={"validation": "absent.jsonl"},
        algorithm={"mini_batches": 3},
        rollout={"options": {"cache_byte": 1}},
        training={"backend": "nonsense"},
        reward={"function": "no_such_module:f"},
    )
    lines = str(refusal(config)).splitlines()
    for part in ("absent.jsonl", "algorithm.mini_batches = 3", "cache_bytes", "'nonsense'", "no_such_module"):
        assert any(part in line for line in lines), part


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"data": {"train": "absent.jsonl"}}, DataError),
        ({"rollout": {"backend": "nonsense"}}, BackendError),
        ({"rollout": {"options": {"dtype": "nonsense", "cache_bytes": 1}}}, ConfigError),
        ({"training": {"backend": "nonsense"}}, BackendError),
    ],
)
def test_a_single_problem_keeps_its_class(
    build: Callable[..., Config], changes: dict[str, Any], kind: type[HybridFlowError]
) -> None:
    assert type(refusal(build(**changes))) is kind


def test_in_process_there_is_one_rank(build: Callable[..., Config], tmp_path: Path) -> None:
    config = build(run={"executor": "in_process"}, cluster={"gpus_per_machine": 4, "machines": 2})
    _, plan = check_run(config, tmp_path / "model")
    assert {model.train.world_size for model in plan.models.values() if model.train} == {1}


@pytest.mark.parametrize(("plan", "who"), [(plan_of(4), "actor 4"), (plan_of(1, reward_ranks=3), "reward 3")])
def test_in_process_a_plan_of_more_ranks_is_refused(build: Callable[..., Config], plan: MappingPlan, who: str) -> None:
    error = refusal(build(run={"executor": "in_process"}, cluster={"gpus_per_machine": 4}), plan)
    assert isinstance(error, PlanError)
    assert str(error).startswith(
        f"run.executor = 'in_process' runs one rank, in the program itself; the plan gives {who} ranks. "
    )


@pytest.mark.parametrize(
    ("plan", "part"),
    [
        (plan_of(2, generation=GenerationSpec(gen_tp_size=2)), "rollout.backend = 'transformers' runs at most 1 and 1"),
        (plan_of(2, train=ParallelSpec(tp_size=2)), "backend 'fsdp' shards over data-parallel ranks only"),
        (plan_of(2, backend="nonsense"), "backend is named 'nonsense'"),
    ],
)
def test_layouts_that_no_backend_runs_are_refused(build: Callable[..., Config], plan: MappingPlan, part: str) -> None:
    assert part in str(refusal(build(cluster={"gpus_per_machine": 2}), plan))


needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="needs hf-engine[megatron]")


@needs_megatron
def test_a_role_may_have_a_training_backend_of_its_own(build: Callable[..., Config], tmp_path: Path) -> None:
    _, plan = check_run(build(roles={"critic": {"backend": "megatron"}}), tmp_path / "model")
    backends = {role: model.backend for role, model in plan.models.items() if model.train and role != "reward"}
    assert backends == {"actor": "fsdp", "critic": "megatron", "reference": "fsdp"}


@pytest.mark.parametrize(
    ("role", "backend", "plan", "message"),
    [
        ("critic", "nonsense", None, "roles.critic.backend = 'nonsense': no training backend is named 'nonsense'"),
        (
            "critic",
            "fsdp",
            plan_of(2, backend="megatron"),
            "roles.critic.backend = 'fsdp': the plan runs critic on 'meg",
        ),
        ("reward", "fsdp", None, "roles.reward.backend: the role reward of ppo holds no model. Remove the key"),
    ],
)
def test_a_backend_that_cannot_be_is_named_by_its_role(
    build: Callable[..., Config], role: str, backend: str, plan: MappingPlan | None, message: str
) -> None:
    try:
        error: HybridFlowError = refusal(
            build(cluster={"gpus_per_machine": 2}, roles={role: {"backend": backend}}), plan
        )
    except ConfigError as refused:
        error = refused
    assert str(error).startswith(message)


def test_flex_attention_on_a_cpu_is_refused(build: Callable[..., Config]) -> None:
    error = refusal(build(training={"attn_implementation": "flex_attention"}), None)
    assert str(error).startswith("training.attn_implementation = 'flex_attention': torch's function has no backward")


def test_eager_attention_is_planned_as_slower(build: Callable[..., Config], tmp_path: Path) -> None:
    seconds = []
    for function in ("sdpa", "eager"):
        _, plan = check_run(build(training={"attn_implementation": function}), tmp_path / function)
        seconds.append(plan.require_estimates().iteration_s)
    assert seconds[0] < seconds[1]


def test_shapes_have_the_attention_that_is_configured(build: Callable[..., Config]) -> None:
    """FlexAttention computes caps and sinks, too; plans and traces take these shapes."""
    shape = dataclasses.replace(ModelShape.preset("llama-2-7b"), keeps_scores=True)
    given = {"actor": shape, "critic": dataclasses.replace(shape, keeps_scores=False)}
    keeping = {"auto": [True, False], "eager": [True, True], "sdpa": [False, False], "flex_attention": [False, False]}
    for function, wanted in keeping.items():
        found = placement.describe_attention(build(training={"attn_implementation": function}), given)
        assert [found[role].keeps_scores for role in given] == wanted


@pytest.fixture(scope="module")
def quickstart() -> Iterator[tuple[Config, RunInputs]]:
    with TemporaryDirectory() as folder:
        config = prepare_quickstart(RunDirectory(Path(folder) / "run"))
        yield config, load_inputs(config, Path(folder) / "model")


@pytest.mark.parametrize("ranks", range(1, 33))
def test_a_quickstart_of_any_ranks_can_run(quickstart: tuple[Config, RunInputs], ranks: int) -> None:
    from hf_algorithms.preflight.budgets import check_calls

    config, inputs = quickstart
    executor = "ray" if ranks > 1 else "in_process"
    config = config.model_copy(
        update={
            "cluster": config.cluster.model_copy(update={"gpus_per_machine": ranks}),
            "run": config.run.model_copy(update={"executor": executor}),
        }
    )
    shapes = {role: model.shape for role, model in inputs.models.items()}
    plan = placement.plan_placement(config, shapes, prompt_tokens=inputs.train.max_prompt_tokens)
    check_plan(config, plan, shapes)
    check_calls(config, plan, walk_calls(config, plan, inputs), is_given=False)
    assert sum(plan.pool(name).num_slots for name in {plan.models[r].pool for r in config.recipe.model_roles}) <= ranks


def test_a_schedule_goes_with_a_warm_start(build: Callable[..., Config], tmp_path: Path) -> None:
    config = build(warm_start={"max_steps": 50}, training={"learning_rate_schedule": "cosine"})
    check_run(config, tmp_path / "model")


def test_a_warm_start_needs_a_model_that_generates(build: Callable[..., Config]) -> None:
    class Generator(Worker):
        @register(protocol=THREE_D_ALL_MICRO_DP, rows="times", reads=("prompt_ids",), writes=("response_ids",))
        def generate_sequences(self, batch: Any, sampling: Any) -> Any: ...

    config = build(warm_start={"max_steps": 5})
    actor = Role(name="actor", worker=Generator)
    others = [dataclasses.replace(role, starts_from=None) for role in config.recipe.roles[1:]]
    config._own_recipe = dataclasses.replace(config.recipe, roles=(actor, *others))
    with pytest.raises(
        ConfigError, match=r"^warm_start\.max_steps = 5: the role actor of ppo generates and holds no model"
    ):
        check_batches(config)
    check_batches(config.model_copy(update={"warm_start": WarmStartConfig()}))


@pytest.mark.parametrize(
    ("own", "address", "given", "threads"),
    [
        (["critic"], "local", None, {"OMP_NUM_THREADS": "2"}),
        (["critic", "reference"], "local", None, {"OMP_NUM_THREADS": "1"}),
        ([], "local", None, {}),
        (["critic"], "local", "7", {}),
        (["critic"], "10.0.0.1:6379", None, {}),
    ],
)
def test_models_in_pools_of_their_own_share_the_cores(
    build: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: list[str],
    address: str,
    given: str | None,
    threads: dict[str, str],
) -> None:
    """Of a host with eight cores and two ranks for each pool of models."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    limits = dataclasses.replace(read_machine_limits(), num_cpus=8)
    monkeypatch.setattr("hf_algorithms.wiring.read_machine_limits", lambda: limits)
    config, plan = build(warm_start={"max_steps": 0}, cluster={"address": address}), plan_of(2)
    slots = (MachinePlan(gpu_kind="cpu", slots=2),)
    pools = (*plan.pools, *(PoolPlan(name=role, machines=slots) for role in own))
    models = {role: dataclasses.replace(each, pool=role) if role in own else each for role, each in plan.models.items()}
    plan = dataclasses.replace(plan, pools=pools, models=models)
    groups = build_roles(TracingExecutor(), config, plan, load_inputs(config, tmp_path / "model"), ()).groups
    found = {role: group.spec.environment for role, group in groups.items()}
    assert found == {role: threads if role in ("actor", "critic", "reference") else {} for role in plan.models}


def test_the_keys_of_training_and_rollout_reach_the_workers(build: Callable[..., Config], tmp_path: Path) -> None:
    config = build(
        run={"iterations": 7},
        warm_start={"max_steps": 0},
        algorithm={"mini_batches": 2, "epochs": 3},
        optimizer={"actor_learning_rate": 0.5},
        roles={"critic": {"dtype": "bfloat16", "learning_rate": 0.25}},
        rollout={"stop": ["="], "min_new_tokens": 2, "bucket_bytes": 4096, "verify_transfers": True},
        training={
            "learning_rate_schedule": "cosine",
            "activation_checkpointing": True,
            "compile": True,
            "balance_tokens": True,
            "shared_prompts": False,
            "attn_implementation": "eager",
        },
    )
    inputs = load_inputs(config, tmp_path / "model")
    executor = TracingExecutor()
    groups = build_roles(executor, config, plan_of(2), inputs, ()).groups
    actor, critic = (groups[role].spec for role in ("actor", "critic"))
    training = actor.kwargs["training"]
    assert (training.schedule, training.total_steps) == ("cosine", 42)
    assert training.activation_checkpointing and training.compile and actor.balance_tokens
    assert training.shared_prompts is False and training.attn_implementation == "eager"
    assert (actor.kwargs["bucket_bytes"], actor.kwargs["verify_transfers"]) == (4096, True)
    assert [each.kwargs["training"].dtype for each in (actor, critic)] == ["float32", "bfloat16"]
    assert [each.kwargs["training"].learning_rate for each in (actor, critic)] == [0.5, 0.25]
    assert not groups["reward"].spec.balance_tokens
    sampling = build_sampling(config, stop_ids=(1, 2), step=0)
    assert (sampling.stop_strings, sampling.min_new_tokens, sampling.stop_token_ids) == (("=",), 2, (1, 2))
    assert groups["reward"].spec.kwargs["stop_ids"] == inputs.stop_ids == (inputs.model.tokenizer.eos_token_id,)
