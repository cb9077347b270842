"""Bad input of the family: one clear error before or at its first use, or documented behaviour."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from algorithm_agreement import build_body, run_once

from hf_algorithms.config import parse_config
from small_runs import Outcome, read_metrics

Run = Callable[..., Outcome]

# Every process of a reward pool imports this module: functions that need a large library import it themselves.
REWARDS = """
import math

def too_long(prompts, responses, answers):
    return [1.0] * (len(responses) + 1)

def two_columns(prompts, responses, answers):
    import numpy as np
    return np.ones((len(responses), 2))

def one_number(prompts, responses, answers):
    import torch
    return torch.tensor(1.0)

def texts(prompts, responses, answers):
    return ["good"] * len(responses)

def complex_numbers(prompts, responses, answers):
    import numpy as np
    return np.full(len(responses), 1j)

def half_precision(prompts, responses, answers):
    import torch
    return torch.tensor([len(r) / 4 for r in responses], dtype=torch.bfloat16)

def whole_numbers(prompts, responses, answers):
    import numpy as np
    return np.array([len(r) for r in responses], dtype=np.int8)

def some_unscorable(prompts, responses, answers):
    return [None if n % 4 == 0 else math.nan if n % 4 == 1 else float(n) for n in range(len(responses))]

def all_unscorable(prompts, responses, answers):
    return [None] * len(responses)

def all_equal(prompts, responses, answers):
    return [1.0] * len(responses)

def pairs_of_odd_sums_differ(prompts, responses, answers):
    return [float(n % 2) if int(answer) % 2 else 1.0 for n, answer in enumerate(answers)]

def costly(prompts, responses, answers):
    return [1.0] * len(responses)
"""

RECIPE = """
from dataclasses import dataclass
from typing import Literal

from hf_algorithms import AlgorithmConfig, Recipe, Role
from hf_algorithms.advantages import GroupAdvantage, GAE
from hf_algorithms.losses import PolicyLoss
from hf_algorithms.recipes import ACTOR, ADVANTAGE, REWARD, generate_scored


class Config(AlgorithmConfig):
    name: Literal["mine"] = "mine"


def ask_a_judge(roles, prompts, config, context):
    batch = generate_scored(roles, prompts, context)
    return [roles.judge.compute(batch)]


def read_values(roles, prompts, config, context):
    batch = generate_scored(roles, prompts, context)
    return [roles.advantage.compute_advantages(batch, GAE())]


def skip_advantages(roles, prompts, config, context):
    batch = generate_scored(roles, prompts, context)
    return [roles.actor.update_actor(batch, PolicyLoss(old="current"))]


@dataclass(frozen=True)
class Curious:
    reads = ("response_mask",)
    outputs = ("logprobs", "hidden_states")

    def __call__(self, outputs, micro_batch):
        return outputs["hidden_states"].sum(), {}


def ask_for_states(roles, prompts, config, context):
    return [roles.actor.update_actor(generate_scored(roles, prompts, context), Curious())]


@dataclass(frozen=True)
class LikeATopic:
    # A user's loss over the log-probs of a few tokens, and the entropy.
    reads = ("response_mask", "candidate_ids")
    outputs = ("candidate_logprobs", "entropy")

    def __call__(self, outputs, micro_batch):
        mask = micro_batch["response_mask"]
        likelihood = outputs["candidate_logprobs"].exp().sum(-1).masked_fill(~mask, 0.0)
        entropy = outputs["entropy"].masked_fill(~mask, 0.0)
        number = micro_batch["candidate_ids"].shape[-1]
        return -(likelihood + entropy).sum(), {"mine/candidates": (float(number), 1.0)}


def like_a_topic(roles, prompts, config, context):
    batch = generate_scored(roles, prompts, context)
    batch = batch.union(roles.reference.compute_teacher_candidates(batch, top_k=3))
    return [roles.actor.update_actor(batch, LikeATopic())]


def divide(roles, prompts, config, context):
    return [1 / 0]


def divide_later(roles, prompts, config, context):
    batch = generate_scored(roles, prompts, context)
    batch = batch.union(roles.advantage.compute_advantages(batch, GroupAdvantage()))
    if context.iteration:
        raise KeyError("weights")
    return [roles.actor.update_actor(batch, PolicyLoss(old="current"))]


def give_a_text(roles, prompts, config, context):
    generate_scored(roles, prompts, context)
    return ["done"]


for step in (ask_a_judge, read_values, skip_advantages, divide, divide_later, give_a_text, ask_for_states):
    globals()[step.__name__.upper()] = Recipe(name="mine", config=Config, roles=(ACTOR, REWARD, ADVANTAGE), step=step)

SCORER = Role(name="reference", worker="hf_algorithms.workers:TeacherWorker", has_model=True, starts_from="actor")
LIKE_A_TOPIC = Recipe(name="mine", config=Config, roles=(ACTOR, REWARD, ADVANTAGE, SCORER), step=like_a_topic)
"""


@pytest.fixture
def config(small_config: Path) -> Iterator[Path]:
    """A small run of one iteration without a warm start; a recipe and rewards are in its folder."""
    small_config.with_name("family_rewards.py").write_text(REWARDS)
    small_config.with_name("family_recipe.py").write_text(RECIPE)
    text = (
        small_config.read_text().replace("max_steps = 4", "max_steps = 0").replace("iterations = 2", "iterations = 1")
    )
    small_config.write_text(text)
    before = set(sys.modules)
    yield small_config
    for name in sys.modules.keys() - before:
        if name.startswith("family_re"):
            del sys.modules[name]
    sys.path[:] = [folder for folder in sys.path if folder != str(small_config.parent)]


def settings(*pairs: str) -> list[str]:
    return [argument for pair in pairs for argument in ("--set", pair)]


def get_error(outcome: Outcome, code: int) -> str:
    """The one message of a command that failed with this code."""
    assert outcome.exit_code == code, outcome.errors
    (message,) = (line for line in outcome.errors.splitlines() if line.startswith("Error: "))
    assert "Traceback" not in outcome.errors.split("Error: ")[0], outcome.errors
    return message


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("too_long", "family_rewards:too_long returned 2 scores for 1 responses. Return one for each"),
        ("two_columns", "returned [1.0, 1.0] (list), which is not a number, for response "),
        ("one_number", "(Tensor), which is not a list, for 1 responses"),
        ("texts", "returned 'good' (str), which is not a number, for response "),
        ("complex_numbers", "returned 1j (complex), which is not a number, for response "),
    ],
)
def test_a_reward_of_the_wrong_form_is_one_error(config: Path, hybridflow: Run, function: str, says: str) -> None:
    outcome = hybridflow("train", config, *settings(f"reward.function=family_rewards:{function}"))
    get_error(outcome, 1)
    assert says in outcome.errors


@pytest.mark.parametrize("function", ["half_precision", "whole_numbers"])
def test_a_reward_of_another_dtype_is_taken_as_numbers(config: Path, hybridflow: Run, function: str) -> None:
    outcome = hybridflow("train", config, *settings(f"reward.function=family_rewards:{function}"))
    assert outcome.exit_code == 0, outcome.errors
    (row,) = read_metrics(config.parent / "run")
    assert row["reward/std"] > 0


@pytest.mark.parametrize("name", ["ppo", "grpo", "rloo", "remax", "dapo", "online_dpo"])
def test_unscorable_responses_are_counted_and_left_out(config: Path, hybridflow: Run, name: str) -> None:
    keys = (f"algorithm.name={name}", "rollout.samples_per_prompt=2", "reward.function=family_rewards:all_unscorable")
    outcome = hybridflow("train", config, *settings(*keys))
    assert outcome.exit_code == 0, outcome.errors
    (row,) = read_metrics(config.parent / "run")
    assert "reward/mean" not in row
    if name == "dapo":
        assert row["actor/skipped_steps"] == 1.0
        assert row["group/filtered"] >= 8
        assert row["reward/unscorable"] == 2 * row["group/filtered"]
        return
    assert row["reward/unscorable"] == 16  # responses
    assert row.get("actor/grad_norm", 0.0) < 1e-6  # no reference: the current policy is it


def test_some_unscorable_responses_leave_the_others_to_train(config: Path, hybridflow: Run) -> None:
    keys = ("algorithm.name=grpo", "rollout.samples_per_prompt=4", "reward.function=family_rewards:some_unscorable")
    outcome = hybridflow("train", config, *settings(*keys))
    assert outcome.exit_code == 0, outcome.errors
    (row,) = read_metrics(config.parent / "run")
    assert row["reward/unscorable"] == 16  # of 32
    assert row["actor/grad_norm"] > 0


def test_groups_of_equal_scores_train_nothing(config: Path, hybridflow: Run) -> None:
    keys = ("algorithm.name=grpo", "rollout.samples_per_prompt=2", "reward.function=family_rewards:all_equal")
    outcome = hybridflow("train", config, *settings(*keys))
    assert outcome.exit_code == 0, outcome.errors
    (row,) = read_metrics(config.parent / "run")
    assert row["group/zero_variance"] == 1.0
    assert row["actor/grad_norm"] < 1e-6


@pytest.mark.parametrize(("function", "num_trained"), [("pairs_of_odd_sums_differ", 16), ("all_equal", 0)])
def test_samples_are_dropped_if_no_update_learns(
    config: Path, hybridflow: Run, function: str, num_trained: int
) -> None:
    """A mini-batch whose pairs are all equal is skipped; the others' updates learn."""
    keys = ("algorithm.name=online_dpo", "algorithm.mini_batches=8", "rollout.samples_per_prompt=2")
    outcome = hybridflow("train", config, *settings(*keys, f"reward.function=family_rewards:{function}"))
    assert outcome.exit_code == 0, outcome.errors
    run = config.parent / "run"
    (row,) = read_metrics(run)
    assert row["actor/skipped_steps"] == 1.0
    assert ("actor/grad_norm" in row) == bool(num_trained)
    ledger = json.loads((run / "summary.json").read_text())["ledger"]
    assert (ledger["trained"], ledger["dropped"]) == (num_trained, 16 - num_trained)


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize("name", ["grpo", "rloo", "dapo", "online_dpo"])
def test_a_group_of_one_is_refused(config: Path, hybridflow: Run, command: str, name: str) -> None:
    outcome = hybridflow(command, config, *settings(f"algorithm.name={name}"))
    assert "rollout.samples_per_prompt = 1: " in get_error(outcome, 2)
    assert not (config.parent / "run").exists()


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            ("algorithm.old_logprobs=current", "algorithm.mini_batches=2", "algorithm.kl_place=loss"),
            "algorithm.old_logprobs = 'current': with algorithm.mini_batches = 2",
        ),
        (
            ("algorithm.old_logprobs=current", "algorithm.kl_place=reward"),
            "algorithm.old_logprobs = 'current': algorithm.kl_place = 'reward' reads them",
        ),
        (
            ("algorithm.old_logprobs=sampled", "algorithm.correction=tis"),
            "algorithm.correction = 'tis': with algorithm.old_logprobs = 'sampled'",
        ),
        (
            ("algorithm.name=dapo", "algorithm.overlong_buffer=100", "rollout.samples_per_prompt=2"),
            "algorithm.overlong_buffer = 100: is not between 1 and the ",
        ),
        (("algorithm.name=remax", "algorithm.epochs=2"), "algorithm.epochs = 2: algorithm.ratio = 'none' takes one"),
        (
            ("algorithm.name=remax", "algorithm.clip_low=0.1"),
            "algorithm.clip_low = 0.1: algorithm.ratio = 'none' clips",
        ),
        (
            ("algorithm.kl_place=loss", "algorithm.kl_estimator=k1", "algorithm.kl_gradient=value"),
            "algorithm.kl_gradient = 'value': in the loss the expected gradient of algorithm.kl_estimator = 'k1' is 0",
        ),
        (
            ("algorithm.kl_target=0.1", "algorithm.kl_coefficient=0"),
            "algorithm.kl_coefficient = 0: algorithm.kl_target",
        ),
        (("algorithm.kl_horizon=5",), "algorithm.kl_horizon = 5: without algorithm.kl_target"),
        (
            ("algorithm.kl_stop=0.1", "algorithm.mini_batches=1"),
            "algorithm.kl_stop = 0.1: an iteration makes one update",
        ),
        (
            ("algorithm.name=safe_rlhf",),
            "cost.function or [cost.model] is missing: algorithm.name = 'safe_rlhf' needs it",
        ),
        (("algorithm.name=distillation",), "roles.teacher.path is missing: algorithm.name = 'distillation' needs it"),
        (("roles.judge.path=somewhere",), "[roles.judge]: recipe 'ppo' has no role 'judge'"),
        (("algorithm.recipe=family_recipe:ASK_A_JUDGE",), "roles.judge: the recipe has no role of that name"),
        (("algorithm.recipe=family_recipe:READ_VALUES",), "advantage.compute_advantages: GAE reads values"),
        (
            ("algorithm.recipe=family_recipe:SKIP_ADVANTAGES",),
            "actor.update_actor: PolicyLoss reads advantages",
        ),
        (
            ("algorithm.recipe=family_recipe:ASK_FOR_STATES",),
            "actor.update_actor: Curious.outputs=('logprobs', 'hidden_states'): a model with the head 'lm' has",
        ),
        (("algorithm.recipe=family_recipe:DIVIDE",), "step of recipe 'mine' raised ZeroDivisionError"),
        (("algorithm.recipe=family_recipe:GIVE_A_TEXT",), "step of recipe 'mine' returned 'done'"),
    ],
)
def test_a_contradiction_is_refused_before_anything_starts(
    config: Path, hybridflow: Run, keys: tuple[str, ...], says: str
) -> None:
    outcome = hybridflow("train", config, *settings(*keys))
    assert says in get_error(outcome, 2)
    assert not (config.parent / "run").exists()


def test_a_step_that_raises_in_the_run_is_one_error(config: Path, hybridflow: Run) -> None:
    keys = ("algorithm.recipe=family_recipe:DIVIDE_LATER", "rollout.samples_per_prompt=2")
    outcome = hybridflow("train", config, *settings(*keys))
    assert "step of recipe 'mine' raised KeyError: 'weights'" in get_error(outcome, 1)
    assert "family_recipe.py" in outcome.errors
    assert json.loads((config.parent / "run" / "summary.json").read_text())["iterations"] == 0


@pytest.mark.parametrize(("hidden_size", "num_layers"), [(16, 1), (64, 2)])
def test_a_critic_of_another_size_works(addition_data: Path, tmp_path: Path, hidden_size: int, num_layers: int) -> None:
    first = build_body("grpo", addition_data, tmp_path / "first", teacher=None, on_ray=False)
    first["model"] |= {"hidden_size": hidden_size, "num_layers": num_layers}
    run_once(first)
    body = build_body("ppo", addition_data, tmp_path / "run", teacher=None, on_ray=False)
    found = run_once(body | {"roles": {"critic": {"path": str(tmp_path / "first" / "initial_model")}}})
    assert found.metrics["critic/grad_norm"] > 0
    sizes = json.loads((tmp_path / "first" / "initial_model" / "config.json").read_text())
    assert (sizes["hidden_size"], sizes["num_hidden_layers"]) == (hidden_size, num_layers)


def test_a_teacher_with_another_tokenizer_is_refused(config: Path, hybridflow: Run, addition_data: Path) -> None:
    first = config.parent / "first"
    body = build_body("grpo", addition_data, first, teacher=None, on_ray=False)
    body["model"] |= {"tokenizer": "bpe", "vocab_size": 300, "max_positions": 32}
    run_once(body)
    keys = ("algorithm.name=distillation", f"roles.teacher.path={first / 'initial_model'}")
    message = get_error(hybridflow("train", config, *settings(*keys)), 2)
    assert "roles.teacher.path = " in message
    assert "its tokenizer has another vocabulary than the run's" in message


@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_top_k_that_leaves_no_rest_is_refused(
    config: Path, hybridflow: Run, addition_data: Path, command: str
) -> None:
    first = config.parent / "first"
    run_once(build_body("grpo", addition_data, first, teacher=None, on_ray=False))
    teacher = first / "initial_model"
    size = json.loads((teacher / "config.json").read_text())["vocab_size"]
    keys = ("algorithm.name=distillation", f"roles.teacher.path={teacher}", "algorithm.signal=top_k")
    message = get_error(hybridflow(command, config, *settings(*keys, f"algorithm.top_k={size}")), 2)
    assert f"algorithm.top_k = {size}: the actor's vocabulary has {size} tokens" in message
    assert f"Lower it to at most {size - 1}" in message
    assert not (config.parent / "run").exists()


def test_a_users_loss_reads_entropies_and_given_tokens(config: Path, hybridflow: Run) -> None:
    outcome = hybridflow("train", config, *settings("algorithm.recipe=family_recipe:LIKE_A_TOPIC"))
    assert outcome.exit_code == 0, outcome.errors
    (row,) = read_metrics(config.parent / "run")
    assert row["mine/candidates"] == 3.0
    assert row["actor/grad_norm"] > 0


def test_a_multiplier_stays_at_its_bound_and_says_so(addition_data: Path, tmp_path: Path, config: Path) -> None:
    body = build_body("safe_rlhf", addition_data, tmp_path / "bound", teacher=None, on_ray=False)
    body["cost"] = {"function": "family_rewards:costly"}
    body["algorithm"] |= {"lambda_init": 2.0, "lambda_max": 2.0}
    sys.path.append(str(config.parent))
    found = run_once(body)
    assert found.metrics["constraint/lambda"] == pytest.approx(2.0)
    assert found.metrics["constraint/cost"] == 1.0
    assert parse_config(body).algorithm.model_dump()["lambda_max"] == 2.0


def test_a_multiplier_that_starts_above_its_bound_is_refused(config: Path, hybridflow: Run) -> None:
    keys = ("algorithm.name=safe_rlhf", "cost.function=family_rewards:costly", "algorithm.lambda_init=3.0")
    message = get_error(hybridflow("train", config, *settings(*keys, "algorithm.lambda_max=2.0")), 2)
    assert "algorithm.lambda_init = 3.0" in message and "algorithm.lambda_max = 2.0" in message
