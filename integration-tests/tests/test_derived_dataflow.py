"""What is read off a recipe's step is the published dataflow; for recipes of one's own too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from hf_algorithms import PPOConfig, Recipe, Role, derive_dataflow
from hf_algorithms.recipes import RECIPES, mini_batch_rows
from hf_controller import Worker
from hf_engine import SamplingParams
from hf_protocols import DP, FROM_ARGUMENT, THREE_D, BatchError, ConfigError, Dataflow, ModelCall, register

SEQUENCE = ("prompt_ids", "response_ids", "response_mask")
SAMPLING = SamplingParams(max_new_tokens=8, n=2)
Step = Callable[..., Sequence[Any]]


class CostWorker(Worker):
    """A model that a recipe of one's own adds."""

    @register(protocol=DP, reads=(*SEQUENCE, "answer"), writes=("costs",), kind="inference")
    def compute_cost(self, batch: object) -> None:
        raise AssertionError("nothing runs")

    @register(protocol=DP, returns="object", reads=("costs",))
    def choose_weight(self, batch: object) -> None:
        raise AssertionError("nothing runs")


class OwnAdvantageWorker(Worker):
    """Takes scores and costs, or scores of greedy responses."""

    @register(
        protocol=DP,
        reads=("response_mask", "scores", "costs?", "greedy_scores?", "old_logprobs", "ref_logprobs", "values?"),
        writes=("advantages", "returns"),
    )
    def compute_advantages(self, batch: object, weight: object = None) -> None:
        raise AssertionError("nothing runs")


class SilentWorker(Worker):
    @register(protocol=THREE_D)
    def compute_values(self, batch: object) -> None:
        raise AssertionError("nothing runs")


OWN = (Role(name="cost", worker=CostWorker), Role(name="advantage", worker=OwnAdvantageWorker))


def derive(step: Step, config: Any = None, own: Sequence[Role] = OWN) -> Dataflow:
    """The dataflow of a step over the roles of PPO, of which those of `own` replace those of their name."""
    roles = {role.name: role for role in (*RECIPES["ppo"].roles, *own)}
    recipe = Recipe(name="own", config=PPOConfig, roles=tuple(roles.values()), step=step)
    return derive_dataflow(recipe, config, SAMPLING, num_prompts=8)


def edges(flow: Dataflow, *, like: Dataflow | None = None) -> list[tuple[str, str, frozenset[tuple[int, str]]]]:
    """Every call and what it reads of earlier calls, by number and column; only what ``like`` reads too."""
    writer = {column: number for number, call in enumerate(flow.calls) for column in call.writes}
    allowed = [set(call.reads) for call in (like or flow).calls]
    return [
        (
            call.role,
            call.method,
            frozenset((writer[column], column) for column in call.reads if column in writer and column in wanted),
        )
        for call, wanted in zip(flow.calls, allowed, strict=True)
    ]


def names(stages: tuple[tuple[ModelCall, ...], ...]) -> list[list[str]]:
    return [[f"{call.role}.{call.method}" for call in stage] for stage in stages]


def assert_is(flow: Dataflow, preset: str) -> None:
    """The calls, stages, kinds and columns of the preset. Optional columns that happen to be there may be read too."""
    published = with_reward_function(Dataflow.preset(preset))
    assert names(flow.stages()) == names(published.stages())
    assert edges(flow, like=published) == edges(published)
    for found, wanted in zip(flow.calls, published.calls, strict=True):
        assert set(wanted.reads) <= set(found.reads), wanted.method
        assert (found.kind, found.writes) == (wanted.kind, wanted.writes)


def with_reward_function(flow: Dataflow) -> Dataflow:
    """The shipped reward is a Python function of texts; the published one is a model, which reads the mask too."""
    texts = ("prompt_ids", "response_ids", "answer")
    calls = [replace(call, kind="function", reads=texts) if call.role == "reward" else call for call in flow.calls]
    return Dataflow(name=flow.name, calls=tuple(calls))


def respond(roles: Any, prompts: Any, **options: Any) -> Any:
    return prompts.repeat(2).union(roles.actor.generate_sequences(prompts, SAMPLING, **options))


def test_every_shipped_recipe_has_the_dataflow_of_its_preset() -> None:
    for name, recipe in RECIPES.items():
        assert_is(derive_dataflow(recipe, recipe.config(), SAMPLING, num_prompts=8), name)


@pytest.mark.parametrize(("epochs", "mini_batches"), [(1, 4), (3, 2), (2, 16)])
def test_updates_on_mini_batches_are_one_call(epochs: int, mini_batches: int) -> None:
    config = PPOConfig(epochs=epochs, mini_batches=mini_batches)
    assert_is(derive_dataflow(RECIPES["ppo"], config, SAMPLING, num_prompts=8), "ppo")


def test_the_samplers_log_probs_save_a_call() -> None:
    flow = derive_dataflow(RECIPES["ppo"], PPOConfig(old_logprobs="sampled"), SAMPLING, num_prompts=8)
    assert "compute_logprobs" not in {call.method for call in flow.calls}
    (update,) = (call for call in flow.calls if call.method == "update_actor")
    assert {"rollout_logprobs", "advantages"} <= set(update.reads)  # renamed in the recipe, still the sampler's


def safe_rlhf(roles: Any, prompts: Any, config: Any, sampling: Any) -> Sequence[Any]:
    batch = respond(roles, prompts)
    batch = batch.union(roles.actor.compute_logprobs(batch)).union(roles.critic.compute_values(batch))
    batch = batch.union(roles.reference.compute_ref_logprobs(batch)).union(roles.reward.compute_reward(batch))
    batch = batch.union(roles.cost.compute_cost(batch))
    batch = batch.union(roles.advantage.compute_advantages(batch))
    metrics = []
    for rows in mini_batch_rows(batch.num_rows, 4, epochs=2, seed=0):
        metrics += [
            roles.critic.update_critic(batch.rows(rows), None),
            roles.actor.update_actor(batch.rows(rows), None),
        ]
    return metrics


def test_a_recipe_of_ones_own_with_one_more_model() -> None:
    assert_is(derive(safe_rlhf), "safe-rlhf")


def remax(roles: Any, prompts: Any, config: Any, sampling: Any) -> Sequence[Any]:
    sampled, greedy = respond(roles, prompts), respond(roles, prompts)
    batch = sampled.union(roles.actor.compute_logprobs(sampled))
    batch = batch.union(roles.reference.compute_ref_logprobs(batch)).union(roles.reward.compute_reward(batch))
    baseline = roles.reward.compute_reward(greedy).rename({"scores": "greedy_scores"})
    batch = batch.union(baseline)
    batch = batch.union(roles.advantage.compute_advantages(batch))
    return [roles.actor.update_actor(batch, None)]


def test_two_generations_of_the_same_prompts_are_two_calls() -> None:
    flow, published = derive(remax), Dataflow.preset("remax")
    assert names(flow.stages()) == names(published.stages())
    number = {column: index for index, call in enumerate(flow.calls) for column in call.writes}
    by_method = [(call.role, call.method, {number[c] for c in call.reads if c in number}) for call in flow.calls]
    wanted = {column: index for index, call in enumerate(published.calls) for column in call.writes}
    expected = [(call.role, call.method, {wanted[c] for c in call.reads if c in wanted}) for call in published.calls]
    expected[-1][2].add(3)  # the update may take the reference's log-probs, and they are in the batch
    assert by_method == expected
    (advantages,) = (call for call in flow.calls if call.role == "advantage")
    assert {"scores", "greedy_scores"} <= set(advantages.reads)


def in_parts(roles: Any, prompts: Any, config: Any, sampling: Any) -> Sequence[Any]:
    """PPO on two halves of the prompts, the values by threes, joined, shuffled and cut again."""
    halves = [respond(roles, part) for part in prompts.split(2)]
    batch = halves[0].concat(halves[1])
    thirds = [part.union(roles.actor.compute_logprobs(part)) for part in batch.split(3)]
    batch = thirds[0].concat(thirds[1]).concat(thirds[2])
    parts = [batch.rows(range(start, start + 4)) for start in (12, 4, 0, 8)]
    values = [roles.critic.compute_values(part.select(list(SEQUENCE))) for part in parts]
    ordered = values[2].concat(values[1]).concat(values[3]).concat(values[0])
    batch = batch.union(ordered).union(roles.reference.compute_ref_logprobs(batch))
    batch = batch.union(roles.reward.compute_reward(batch))
    batch = batch.union(roles.advantage.compute_advantages(batch))
    return [roles.critic.update_critic(batch, None), roles.actor.update_actor(batch, None)]


def test_parts_of_a_batch_are_one_call() -> None:
    assert_is(derive(in_parts), "ppo")


def test_an_object_that_is_handed_on_is_a_dependency() -> None:
    def step(roles: Any, prompts: Any, config: Any, sampling: Any) -> Sequence[Any]:
        batch = respond(roles, prompts)
        batch = batch.union(roles.actor.compute_logprobs(batch)).union(roles.reference.compute_ref_logprobs(batch))
        batch = batch.union(roles.reward.compute_reward(batch))
        costs = batch.union(roles.cost.compute_cost(batch))
        batch = batch.union(roles.advantage.compute_advantages(batch, roles.cost.choose_weight(costs)))
        return [roles.actor.update_actor(batch, None)]

    stages = names(derive(step).stages())
    assert stages[2:] == [["cost.choose_weight"], ["advantage.compute_advantages"], ["actor.update_actor"]]


def test_a_step_may_branch_on_metrics() -> None:
    def step(roles: Any, prompts: Any, config: Any, context: Any) -> Sequence[Any]:
        batch = respond(roles, prompts)
        metrics = roles.actor.update_actor(batch, None)
        return [roles.critic.compute_values(batch), metrics] if metrics.result()["loss"] < 1 else []

    flow = derive(step)
    assert [call.method for call in flow.calls] == ["generate_sequences", "update_actor", "compute_values"]


def test_a_step_that_reads_a_batch_or_an_object_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"result of a batch of .*actor\.generate_sequences.*0\.0 while tracing"):
        derive(lambda roles, prompts, config, context: [respond(roles, prompts).result()])
    with pytest.raises(ConfigError, match=r"result of actor\.describe_transition is not available: calls are traced"):
        derive(lambda roles, prompts, config, context: [roles.actor.describe_transition().result()])


@dataclass(frozen=True)
class OwnEstimator:
    """Columns that nobody here knows."""

    reads: tuple[str, ...] = ("scores", "costs", "greedy_scores?")
    writes: tuple[str, ...] = ("own_advantages",)


@dataclass(frozen=True)
class OwnLoss:
    reads: tuple[str, ...] = ("own_advantages",)


class DeclaringAdvantageWorker(Worker):
    @register(protocol=DP, reads=("response_mask",), writes=FROM_ARGUMENT)
    def compute_advantages(self, batch: object, estimator: object) -> None:
        raise AssertionError("nothing runs")


def declaring_step(estimator: object) -> Step:
    def step(roles: Any, prompts: Any, config: Any, context: Any) -> Sequence[Any]:
        batch = respond(roles, prompts)
        batch = batch.union(roles.reward.compute_reward(batch)).union(roles.cost.compute_cost(batch))
        batch = batch.union(roles.advantage.compute_advantages(batch, estimator))
        return [roles.actor.update_actor(batch, OwnLoss())]

    return step


def test_columns_that_arguments_declare_are_in_the_dataflow() -> None:
    flow = derive(
        declaring_step(OwnEstimator()), own=[*OWN[:1], Role(name="advantage", worker=DeclaringAdvantageWorker)]
    )
    advantages, update = flow.calls[-2:]
    assert (set(advantages.reads), advantages.writes) == ({"response_mask", "scores", "costs"}, ("own_advantages",))
    assert "own_advantages" in update.reads


def test_a_declared_column_that_nobody_writes_is_named() -> None:
    step = declaring_step(OwnEstimator(reads=("values",)))
    with pytest.raises(BatchError, match=r"^advantage\.compute_advantages: OwnEstimator reads values; the batch has "):
        derive(step, own=[*OWN[:1], Role(name="advantage", worker=DeclaringAdvantageWorker)])


def test_mistakes_are_named() -> None:
    with pytest.raises(BatchError, match=r"critic\.update_critic asks for returns, values"):
        derive(lambda roles, prompts, config, sampling: [roles.critic.update_critic(respond(roles, prompts), None)])
    with pytest.raises(ConfigError, match=r"no role 'judge'"):
        derive(lambda roles, prompts, config, sampling: [roles.judge.compute(prompts)])
    with pytest.raises(ConfigError, match=r"critic\.compute_values does not say which columns it returns"):
        derive(
            lambda roles, prompts, config, sampling: [roles.critic.compute_values(prompts)],
            own=[Role(name="critic", worker=SilentWorker)],
        )


def test_deriving_starts_neither_ray_nor_a_model() -> None:
    program = (
        "import sys\n"
        "from hf_algorithms import PPOConfig, derive_dataflow\n"
        "from hf_algorithms.recipes import RECIPES\n"
        "from hf_engine import SamplingParams\n"
        "flow = derive_dataflow(RECIPES['ppo'], PPOConfig(), SamplingParams(max_new_tokens=8), num_prompts=8)\n"
        "assert len(flow.calls) == 8\n"
        "sys.exit(bool({'ray', 'transformers', 'hf_mapper'} & sys.modules.keys()))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=100).returncode == 0
