"""Dataflow derived from a recipe's step: equal to the published one; also for recipes of a user's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from hf_algorithms import PPOConfig, Recipe, Role, derive_dataflow
from hf_algorithms.advantages import ReinforceAdvantage
from hf_algorithms.losses import PolicyLoss, SupervisedLoss, ValueLoss
from hf_algorithms.recipes import RECIPES, mini_batch_rows
from hf_controller import Worker
from hf_engine import SamplingParams
from hf_protocols import DP, FROM_ARGUMENT, THREE_D, BatchError, ConfigError, Dataflow, ModelCall, register

SEQUENCE = ("prompt_ids", "response_ids", "response_mask")
SAMPLING = SamplingParams(max_new_tokens=8, n=2)
Step = Callable[..., Sequence[Any]]
PPO = Dataflow.preset("ppo")


class CostModelWorker(Worker):
    """A model that a recipe of one's own adds."""

    @register(
        protocol=DP,
        reads=(*SEQUENCE, "answer", "sample_id?", "group_id", "finish_reason"),
        writes=("costs",),
        kind="inference",
    )
    def compute_cost(self, batch: object) -> None:
        raise AssertionError("nothing runs")

    @register(protocol=DP, returns="object", reads=("costs",))
    def choose_weight(self, batch: object) -> None:
        raise AssertionError("nothing runs")


class OwnAdvantageWorker(Worker):
    """Takes scores and costs."""

    @register(
        protocol=DP,
        reads=("response_mask", "scores", "costs?", "old_logprobs", "ref_logprobs", "values?"),
        writes=("advantages", "returns"),
    )
    def compute_advantages(self, batch: object, weight: object = None) -> None:
        raise AssertionError("nothing runs")


class SilentWorker(Worker):
    @register(protocol=THREE_D)
    def compute_values(self, batch: object) -> None:
        raise AssertionError("nothing runs")


OWN = (Role(name="cost", worker=CostModelWorker), Role(name="advantage", worker=OwnAdvantageWorker))


def derive(step: Step, config: Any = None, own: Sequence[Role] = OWN) -> Dataflow:
    """The dataflow of a step over the roles of PPO, of which those of `own` replace those of their name."""
    roles = {role.name: role for role in (*RECIPES["ppo"].roles, *own)}
    recipe = Recipe(name="own", config=PPOConfig, roles=tuple(roles.values()), step=step)
    return derive_dataflow(recipe, config, SAMPLING, num_prompts=8)


def names(stages: tuple[tuple[ModelCall, ...], ...]) -> list[list[str]]:
    """The calls of every stage; their order in a stage means nothing."""
    return [sorted(f"{call.role}.{call.method}" for call in stage) for stage in stages]


def assert_is(flow: Dataflow, published: Dataflow) -> None:
    """The calls, stages, kinds and columns of `published`. Optional columns that happen to be there may be read too."""
    assert names(flow.stages()) == names(published.stages())
    called = {(call.role, call.method, frozenset(call.writes)): call for call in flow.calls}
    wanted = {(call.role, call.method, frozenset(call.writes)): call for call in published.calls}
    assert called.keys() == wanted.keys()
    for key, call in wanted.items():
        assert set(call.reads) <= set(called[key].reads), key
        assert called[key].kind == call.kind, key


def respond(roles: Any, prompts: Any, **options: Any) -> Any:
    return prompts.repeat(2).union(roles.actor.generate_sequences(prompts, SAMPLING, **options))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_dataflow_of_its_preset(name: str) -> None:
    """Nodes, columns, kinds and their order; a preset or a recipe that changes alone fails here."""
    recipe = RECIPES[name]
    assert derive_dataflow(recipe, recipe.config(name=name), SAMPLING, num_prompts=8) == Dataflow.preset(name)


def test_recomputing_old_log_probs_costs_a_call() -> None:
    recipe = RECIPES["grpo"]
    config = recipe.config(name="grpo", old_logprobs="recomputed")
    methods = [call.method for call in derive_dataflow(recipe, config, SAMPLING, num_prompts=8).calls]
    assert methods.count("compute_logprobs") == 1
    assert len(methods) == len(Dataflow.preset("grpo").calls) + 1


@pytest.mark.parametrize("name", RECIPES)
def test_every_shipped_recipe_ends_in_updates_of_a_model(name: str) -> None:
    recipe = RECIPES[name]
    flow = derive_dataflow(recipe, recipe.config.model_validate({"name": name}), SAMPLING, num_prompts=8)
    assert flow.name == name
    assert flow.stages()[0][0].kind == "generation"
    assert {call.kind for call in flow.stages()[-1]} == {"training"}
    assert set(flow.roles) <= {role.name for role in recipe.roles}


@pytest.mark.parametrize(("epochs", "mini_batches"), [(1, 4), (3, 2), (2, 16)])
def test_updates_on_mini_batches_are_one_call(epochs: int, mini_batches: int) -> None:
    config = PPOConfig(epochs=epochs, mini_batches=mini_batches)
    assert_is(derive_dataflow(RECIPES["ppo"], config, SAMPLING, num_prompts=8), PPO)


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
            roles.critic.update_critic(batch.rows(rows), ValueLoss(clip=0.2)),
            roles.actor.update_actor(batch.rows(rows), PolicyLoss()),
        ]
    return metrics


def test_a_recipe_of_ones_own_with_one_more_model() -> None:
    assert_is(derive(safe_rlhf), Dataflow.preset("safe_rlhf_one_critic").with_models(["cost"]))


def remax(roles: Any, prompts: Any, config: Any, sampling: Any) -> Sequence[Any]:
    sampled, greedy = respond(roles, prompts), respond(roles, prompts)
    batch = sampled.union(roles.actor.compute_logprobs(sampled))
    batch = batch.union(roles.reference.compute_ref_logprobs(batch)).union(roles.reward.compute_reward(batch))
    baseline = roles.reward.compute_reward(greedy).rename({"scores": "baseline_scores"})
    batch = batch.union(baseline)
    estimator = ReinforceAdvantage(baseline="greedy", kl_coefficient=1.0)
    batch = batch.union(roles.advantage.compute_advantages(batch, estimator))
    return [roles.actor.update_actor(batch, PolicyLoss())]


def test_two_generations_of_the_same_prompts_are_two_calls() -> None:
    assert_is(derive(remax, own=()), Dataflow.preset("remax"))


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
    return [roles.critic.update_critic(batch, ValueLoss(clip=0.2)), roles.actor.update_actor(batch, PolicyLoss())]


def test_parts_of_a_batch_are_one_call() -> None:
    assert_is(derive(in_parts), PPO)


def test_an_object_that_is_handed_on_is_a_dependency() -> None:
    def step(roles: Any, prompts: Any, config: Any, sampling: Any) -> Sequence[Any]:
        batch = respond(roles, prompts)
        batch = batch.union(roles.actor.compute_logprobs(batch)).union(roles.reference.compute_ref_logprobs(batch))
        batch = batch.union(roles.reward.compute_reward(batch))
        costs = batch.union(roles.cost.compute_cost(batch))
        batch = batch.union(roles.advantage.compute_advantages(batch, roles.cost.choose_weight(costs)))
        return [roles.actor.update_actor(batch, PolicyLoss())]

    stages = names(derive(step).stages())
    assert stages[2:] == [["cost.choose_weight"], ["advantage.compute_advantages"], ["actor.update_actor"]]


def test_a_step_may_branch_on_metrics() -> None:
    def step(roles: Any, prompts: Any, config: Any, context: Any) -> Sequence[Any]:
        batch = respond(roles, prompts)
        metrics = roles.actor.update_actor(batch, SupervisedLoss())
        if metrics.result()["loss"] < 1:
            roles.critic.compute_values(batch)
        return [metrics]

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
class LossOfCosts:
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
        return [roles.actor.update_actor(batch, LossOfCosts())]

    return step


def test_columns_that_arguments_declare_are_in_the_dataflow() -> None:
    own = [*OWN[:1], Role(name="advantage", worker=DeclaringAdvantageWorker)]
    flow = derive(declaring_step(OwnEstimator()), own=own)
    advantages, update = flow.calls[-2:]
    assert (set(advantages.reads), advantages.writes) == ({"response_mask", "scores", "costs"}, ("own_advantages",))
    assert "own_advantages" in update.reads


def test_a_declared_column_that_nobody_writes_is_named() -> None:
    step = declaring_step(OwnEstimator(reads=("values",)))
    with pytest.raises(BatchError, match=r"^advantage\.compute_advantages: OwnEstimator reads values; the batch has "):
        derive(step, own=[*OWN[:1], Role(name="advantage", worker=DeclaringAdvantageWorker)])


def test_mistakes_are_named() -> None:
    with pytest.raises(BatchError, match=r"^critic\.update_critic: ValueLoss reads returns"):
        derive(lambda roles, prompts, *rest: [roles.critic.update_critic(respond(roles, prompts), ValueLoss(clip=0.2))])
    with pytest.raises(ConfigError, match=r"roles.judge: the recipe has no role of that name"):
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
