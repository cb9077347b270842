"""Dynamic sampling: which groups an iteration keeps, and when it draws more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from hf_algorithms.advantages import FilterMetric, select_groups
from hf_algorithms.config import parse_config
from hf_algorithms.dataflow import PROMPT_COLUMNS, build_tracing_context
from hf_algorithms.recipes import ACTOR, ADVANTAGE, RECIPES, REFERENCE, Recipe, Role, StepContext
from hf_algorithms.recipes.dapo import DAPOConfig, fill
from hf_algorithms.roles import Roles
from hf_controller import TracingExecutor, Worker
from hf_engine import SamplingParams
from hf_protocols import DP, BatchError, ConfigError, register
from tabular_roles import FrozenPolicy, TablePolicy, TableReward, TableRun


class NamedRows:
    """Stands for a batch; each row is named by its prompt and its sample."""

    def __init__(self, names: list[Any]) -> None:
        self.names = names

    @property
    def num_rows(self) -> int:
        return len(self.names)

    def repeat(self, times: int) -> NamedRows:
        return NamedRows([(name, sample) for name in self.names for sample in range(times)])

    def union(self, other: NamedRows) -> NamedRows:
        assert other.num_rows == self.num_rows
        return self

    def rows(self, index: list[int]) -> NamedRows:
        return NamedRows([self.names[row] for row in index])

    def concat(self, other: NamedRows) -> NamedRows:
        return NamedRows([*self.names, *other.names])


def run(
    is_kept: Callable[[int], bool], *, wanted: int = 4, left: int = 100, iteration: int = 1, **keys: Any
) -> tuple[list[Any] | None, dict[str, float], list[int]]:
    """The rows found, the counts, and how many prompts each refill asked for."""
    asked: list[int] = []
    drawn = wanted

    def more(num_prompts: int) -> Any:
        nonlocal drawn
        asked.append(num_prompts)
        drawn += num_prompts
        return NamedRows(list(range(drawn - num_prompts, drawn)))

    def select(batch: NamedRows) -> Any:
        groups = sorted({name for name, _ in batch.names})
        return SimpleNamespace(result=lambda: [group for group in groups if is_kept(group)])

    roles: Any = SimpleNamespace(
        actor=SimpleNamespace(generate_sequences=lambda prompts, sampling: prompts.repeat(sampling.n)),
        reward=SimpleNamespace(compute_reward=lambda batch: batch),
        advantage=SimpleNamespace(select_groups=select, compute_metrics=lambda batch: batch),
    )
    sampling: Any = SimpleNamespace(n=2)
    context = StepContext(
        sampling=sampling,
        iteration=iteration,
        state={},
        more_prompts=more,
        pretrain_rows=more,
        count_prompts_left=lambda: left - (drawn - wanted),
    )
    prompts: Any = NamedRows(list(range(wanted)))
    found: Any
    found, (_, counts) = fill(roles, prompts, DAPOConfig(**keys), context)
    return (None if found is None else found.names), counts, asked


def test_groups_are_kept_whole_and_in_order() -> None:
    rows, counts, asked = run(lambda group: True)
    assert rows == [(group, sample) for group in range(4) for sample in range(2)]
    assert (counts, asked) == ({"group/filtered": 0.0, "group/refills": 0.0}, [])


def test_dropped_groups_are_refilled_until_there_are_enough() -> None:
    rows, counts, asked = run(lambda group: group % 2 == 0)
    assert rows is not None
    assert sorted({group for group, _ in rows}) == [0, 2, 4, 6]
    assert asked == [4]
    assert counts == {"group/filtered": 4.0, "group/refills": 1.0}


def test_surplus_groups_are_dropped() -> None:
    rows, counts, asked = run(lambda group: group > 0)
    assert rows is not None
    assert [group for group, sample in rows if sample == 0] == [1, 2, 3, 4]
    assert (asked, counts["group/filtered"]) == ([4], 1.0)  # the scores of one group are equal, three are surplus


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_after_the_last_refill_it_trains_on_what_there_is(limit: int) -> None:
    rows, counts, asked = run(lambda group: group == 1, max_refills=limit)
    assert rows == [(1, 0), (1, 1)]
    assert asked == [4] * limit
    assert counts == {"group/filtered": 3.0 + 4 * limit, "group/refills": float(limit)}


def test_without_any_group_there_is_nothing_to_train_on() -> None:
    rows, counts, asked = run(lambda group: False, max_refills=2)
    assert (rows, asked) == (None, [4, 4])
    assert counts == {"group/filtered": 12.0, "group/refills": 2.0}


def test_a_small_data_set_ends_the_refills() -> None:
    rows, counts, asked = run(lambda group: group == 0, left=3)
    assert (rows, asked) == ([(0, 0), (0, 1)], [])
    assert counts["group/filtered"] == 3.0


def test_a_traced_step_keeps_all_groups() -> None:
    rows, _, asked = run(lambda group: False, iteration=0)
    assert rows is not None and len(rows) == 8
    assert asked == []


@pytest.mark.parametrize(("dp_sizes", "is_skipped"), [({}, False), ({"reference": 4}, True), ({"actor": 4}, True)])
def test_fewer_responses_than_ranks_of_a_role_make_no_update(dp_sizes: dict[str, int], is_skipped: bool) -> None:
    """Of four prompts one has responses whose scores differ: two rows are left."""
    even = np.log([[0.5, 0.5], [0.5, 0.5]]).tolist()
    workers: dict[str, Any] = {
        "actor": (TablePolicy, {"table": even, "learning_rate": 0.1}),
        "reference": (FrozenPolicy, {"table": even}),
        "reward": (TableReward, {"table": [[1.0, 0.0], [0.0, 0.0]]}),
    }
    (found,) = (
        TableRun(
            recipe=RECIPES["dapo"],
            algorithm={"kl_coefficient": 0.1, "max_refills": 0},
            workers=workers,
            iterations=1,
            samples=2,
            prompts=(0, 1, 1, 1),
            dp_sizes=dp_sizes,
        )
        .train()
        .metrics
    )
    assert found["group/filtered"] == 3.0
    assert ("actor/skipped_steps" in found) == is_skipped


NAN = float("nan")
COLUMNS = {
    "scores": torch.tensor([1.0, 1.0, 0.0, 1.0, NAN, 1.0]),
    "format_scores": torch.tensor([0, 2, 1, 1, 3, 4]),
    "response_mask": torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1], [0, 0], [1, 0]], dtype=torch.bool),
    "old_logprobs": torch.zeros(6, 2),
}


@pytest.mark.parametrize(("name", "kept"), [("scores", [1]), ("format_scores", [0, 2]), ("response_tokens", [0, 2])])
def test_groups_are_compared_by_the_named_metric(name: str, kept: list[int]) -> None:
    metric = FilterMetric(name)
    numbers = metric({column: COLUMNS[column] for column in metric.reads})
    assert numbers.dtype == torch.float64
    assert select_groups(numbers, torch.tensor([0, 0, 1, 1, 2, 2])).tolist() == kept


def test_a_metric_of_tokens_is_refused() -> None:
    with pytest.raises(BatchError, match=r"algorithm\.filter_metric='old_logprobs': the column has several numbers"):
        FilterMetric("old_logprobs")(COLUMNS)


def trace(name: str, recipe: Recipe = RECIPES["dapo"], reward: dict[str, Any] | None = None) -> dict[str, Any]:
    """The traced calls of a step by their methods."""
    algorithm = DAPOConfig(filter_metric=name)
    if recipe is RECIPES["dapo"] or reward:
        body = {"data": {"train": "rows.jsonl"}, "reward": reward or {}}
        parse_config({**body, "algorithm": {"name": "dapo", "filter_metric": name}})
    executor, sampling = TracingExecutor(), SamplingParams(max_new_tokens=8, n=2)
    groups = {role.name: executor.build_group(role.name, role.load_worker()) for role in recipe.roles}
    prompts, context = executor.put_columns(PROMPT_COLUMNS, 4), build_tracing_context(executor, sampling)
    recipe.run_step(Roles(groups, recipe.scorers), prompts, algorithm, context)
    assert [call.method for call in executor.calls].count("compute_model_scores") <= 1
    return {call.method: call for call in executor.calls}


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("scores", "scores"),
        ("metric_scores", "metric_scores"),
        ("response_tokens", "response_mask"),
        ("finish_reason", "finish_reason"),
        ("reward/exact_match", "named_scores"),
    ],
)
def test_a_step_computes_and_reads_the_named_metric(name: str, column: str) -> None:
    calls = trace(name)
    assert column in calls["select_groups"].reads
    assert ("compute_metric" in calls) == (name == "metric_scores")
    assert ("compute_named_reward" in calls) == (column == "named_scores")


def test_groups_are_compared_by_model_scores_computed_once() -> None:
    recipe = RECIPES["dapo"].with_scorers({"reward": "a/model"})
    calls = trace("reward/model", recipe, {"model": {"path": "a/model"}})
    assert "model_scores" in calls["select_groups"].reads and "named_scores" not in calls["select_groups"].reads
    assert [call.role for call in calls.values() if "model_scores" in call.writes] == ["reward_model"]
    assert "model_scores" in calls["compute_reward"].reads


class StyleWorker(Worker):
    """A reward of one's own that writes two numbers."""

    @register(protocol=DP, reads=("response_ids",), writes=("scores", "style"))
    def compute_reward(self, batch: TensorDict) -> TensorDict:
        raise AssertionError("it is traced")


def test_a_worker_of_ones_own_names_rewards_by_its_columns() -> None:
    own = replace(RECIPES["dapo"], roles=(ACTOR, REFERENCE, Role(name="reward", worker=StyleWorker), ADVANTAGE))
    assert "style" in trace("reward/style", own)["select_groups"].reads
    with pytest.raises(ConfigError, match=r"no reward has this name\. Use one of reward/style$"):
        trace("reward/model", own)


def test_an_unknown_metric_is_refused_before_the_run() -> None:
    with pytest.raises(
        ConfigError, match=r"^algorithm.filter_metric = 'style': the responses have no such column. .* has"
    ):
        trace("style")


@pytest.mark.parametrize("name", ["group_id", "response_ids", "rollout_logprobs"])
def test_a_column_that_is_not_a_metric_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^algorithm.filter_metric = '{name}': the column has no number that"):
        trace(name)
