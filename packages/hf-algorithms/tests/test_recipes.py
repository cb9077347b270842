"""Recipes run over recording roles: the calls they make are those of the published dataflow."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_algorithms import derive_dataflow
from hf_algorithms.config import WarmStartConfig
from hf_algorithms.dataflow import PROMPT_COLUMNS, build_tracing_context
from hf_algorithms.losses import Aggregation, Clip, PolicyLoss, count_group_tokens
from hf_algorithms.recipes import RECIPES, PPOConfig, StepContext, mini_batch_rows
from hf_algorithms.roles import Roles
from hf_algorithms.run.warm_start import WarmStartError, warm_start
from hf_controller import TracingExecutor
from hf_engine import SamplingParams
from hf_protocols import BatchError, ConfigError, Dataflow


class CountedFuture:
    """Stands for a batch or a metrics future, and knows how many rows it has."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def repeat(self, times: int) -> CountedFuture:
        return CountedFuture(self.num_rows * times)

    def union(self, other: CountedFuture) -> CountedFuture:
        assert other.num_rows == self.num_rows
        return self

    def select(self, columns: list[str]) -> CountedFuture:
        return self

    def rename(self, names: dict[str, str]) -> CountedFuture:
        assert names == {"rollout_logprobs": "old_logprobs"}
        return self

    def rows(self, index: list[int]) -> CountedFuture:
        return CountedFuture(len(index))

    def result(self) -> dict[str, float]:
        return {"supervised/loss": 0.5}


class RecordingGroup:
    def __init__(self, role: str, calls: list[tuple[str, str, int]]) -> None:
        self._role = role
        self._calls = calls

    def __getattr__(self, method: str) -> Any:
        def call(batch: CountedFuture, *args: Any, **kwargs: Any) -> CountedFuture:
            self._calls.append((self._role, method, batch.num_rows))
            times = args[0].n if method == "generate_sequences" else 1
            return CountedFuture(batch.num_rows * times)

        return call


class RecipeSampling:
    n = 2
    temperature = 1.0
    step = 3
    seed = 0
    max_new_tokens = 8


def build_context() -> StepContext:
    def refuse(num_rows: int) -> Any:
        raise AssertionError("the step draws no more rows")

    sampling: Any = RecipeSampling()
    return StepContext(
        sampling=sampling,
        iteration=3,
        state={},
        more_prompts=refuse,
        pretrain_rows=refuse,
        count_prompts_left=lambda: 0,
    )


def record(config: PPOConfig, num_prompts: int) -> list[tuple[str, str, int]]:
    calls: list[tuple[str, str, int]] = []
    roles = Roles({role: RecordingGroup(role, calls) for role in Dataflow.preset("ppo").roles})
    RECIPES["ppo"].step(roles, CountedFuture(num_prompts), config, build_context())
    return calls


def test_ppo_makes_the_calls_of_its_dataflow_in_order() -> None:
    calls = [(role, method) for role, method, _ in record(PPOConfig(), 8) if method != "compute_metrics"]
    assert calls == [(call.role, call.method) for call in Dataflow.preset("ppo").calls]


def test_ppo_that_trusts_the_sampler_scores_no_old_log_probs() -> None:
    calls = [(role, method) for role, method, _ in record(PPOConfig(old_logprobs="sampled"), 8)]
    assert ("actor", "compute_logprobs") not in calls
    recomputed = [(role, method) for role, method, _ in record(PPOConfig(), 8)]
    assert [call for call in recomputed if call != ("actor", "compute_logprobs")] == calls


def test_ppo_updates_on_every_row_once_an_epoch() -> None:
    calls = record(PPOConfig(epochs=2, mini_batches=3), 8)
    for method in ("update_critic", "update_actor"):
        rows = [num_rows for _, name, num_rows in calls if name == method]
        assert len(rows) == 6
        assert sum(rows) == 2 * 16


@given(num_rows=st.integers(1, 50), parts=st.integers(1, 8), epochs=st.integers(1, 3), seed=st.integers(0, 2**31))
def test_mini_batches_partition_every_epoch(num_rows: int, parts: int, epochs: int, seed: int) -> None:
    parts = min(parts, num_rows)
    batches = list(mini_batch_rows(num_rows, parts, epochs=epochs, seed=seed))
    assert len(batches) == parts * epochs
    for epoch in range(epochs):
        epoch_batches = batches[epoch * parts : (epoch + 1) * parts]
        assert Counter(row for batch in epoch_batches for row in batch) == Counter(range(num_rows))
        sizes = [len(batch) for batch in epoch_batches]
        assert max(sizes) - min(sizes) <= 1
    assert batches == list(mini_batch_rows(num_rows, parts, epochs=epochs, seed=seed))


@given(groups=st.integers(1, 20), size=st.integers(1, 4), parts=st.integers(1, 8), seed=st.integers(0, 2**31))
def test_mini_batches_hold_whole_groups(groups: int, size: int, parts: int, seed: int) -> None:
    parts = min(parts, groups)
    batches = list(mini_batch_rows(groups * size, parts, epochs=1, seed=seed, group_size=size))
    found = [[row // size for row in batch] for batch in batches]
    for batch in found:
        assert batch == sorted(batch)
        assert set(Counter(batch).values()) == {size}
    assert Counter(group for batch in found for group in set(batch)) == Counter(range(groups))
    sizes = [len(batch) for batch in found]
    assert max(sizes) - min(sizes) <= size


def test_what_makes_no_mini_batches_is_refused() -> None:
    with pytest.raises(BatchError, match="a batch of 7 rows is not whole groups of 2 responses to a prompt"):
        next(mini_batch_rows(7, 1, epochs=1, seed=0, group_size=2))
    with pytest.raises(BatchError, match=r"^algorithm\.mini_batches = 4: a batch of 3 groups has fewer\. Lower"):
        next(mini_batch_rows(6, 4, epochs=1, seed=0, group_size=2))


@pytest.mark.parametrize(
    ("name", "keys", "keeps"),
    [
        ("ppo", {}, False),
        ("ppo", {"aggregation": "prompt-mean"}, True),
        ("reinforce_pp", {}, False),
        ("grpo", {}, True),
        ("online_dpo", {}, True),
    ],
)
def test_groups_stay_whole_where_something_compares_them(name: str, keys: dict[str, Any], keeps: bool) -> None:
    config = RECIPES[name].config(mini_batches=4, **keys)
    assert config.keeps_groups is keeps
    sampling = SamplingParams(max_new_tokens=8, n=2)
    executor = TracingExecutor()
    recipe = RECIPES[name]
    groups = {role.name: executor.build_group(role.name, role.load_worker()) for role in recipe.roles}
    prompts, context = executor.put_columns(PROMPT_COLUMNS, 8), build_tracing_context(executor, sampling)
    recipe.run_step(Roles(groups), prompts, config, context)
    updates = [call for call in executor.calls if call.method == "update_actor"]
    assert [call.num_rows for call in updates] == [4] * 4
    rows = [sorted(segment.rows) for call in updates for segment in call.reads["response_ids"]]
    is_whole = all(row ^ 1 in part for part in rows for row in part)
    assert is_whole is keeps


def test_mini_batch_prompt_means_average_to_the_unsplit_formula() -> None:
    """Equation 8 of DAPO over the whole batch, in numpy, against the losses of its four mini-batches."""
    groups, size, tokens = 8, 3, 5
    rng = np.random.default_rng(0)
    mask = rng.random((groups * size, tokens)) < 0.7
    mask[::size, 0] = True
    advantages, change = rng.normal(size=mask.shape), 0.1 * rng.normal(size=mask.shape)
    old = rng.normal(-1.0, 0.3, size=mask.shape)
    ratio = np.exp(change)
    terms = -np.minimum(ratio * advantages, ratio.clip(0.8, 1.2) * advantages) * mask
    of_groups = terms.reshape(groups, -1).sum(1) / mask.reshape(groups, -1).sum(1)
    columns = {
        "response_mask": torch.tensor(mask),
        "advantages": torch.tensor(advantages),
        "old_logprobs": torch.tensor(old),
        "group_tokens": count_group_tokens(torch.tensor(mask), torch.arange(groups).repeat_interleave(size)),
    }
    loss = PolicyLoss(surrogate=Clip(low=0.2, high=0.2), aggregation=Aggregation(mode="prompt-mean"))
    found = []
    for rows in mini_batch_rows(groups * size, 4, epochs=1, seed=1, group_size=size):
        part = {name: column[rows] for name, column in columns.items()}
        total, _ = loss({"logprobs": torch.tensor(old + change)[rows]}, part)
        assert loss.count(part) == pytest.approx(2.0, rel=1e-12)
        found.append(float(total) / loss.count(part))
    assert np.mean(found) == pytest.approx(of_groups.mean(), rel=1e-12)


def test_a_role_that_the_plan_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match=r"roles\.critic: the recipe has no role of that name, its roles are actor"):
        _ = Roles({"actor": RecordingGroup("actor", [])}).critic


def run_warm_start(scores: list[float], **config: Any) -> tuple[int, list[str]]:
    notes: list[str] = []
    group: Any = RecordingGroup("actor", [])
    group.methods = {"generate_sequences": None}
    roles = Roles({"actor": group})
    answers = iter(scores)
    settings = WarmStartConfig(max_steps=10, eval_every=2, **config)
    batches = iter([CountedFuture(4)] * 10)
    steps = warm_start(roles, batches, lambda: next(answers), settings, metric="exact_match", note=notes.append)
    return steps, notes


def test_warm_start_stops_once_an_evaluation_reaches_its_mark() -> None:
    steps, notes = run_warm_start([0.1, 0.36, 0.9], stop_at=0.35)
    assert steps == 4
    assert len(notes) == 2


def test_without_a_mark_the_warm_start_takes_all_steps() -> None:
    assert run_warm_start([0.9] * 5)[0] == 10


def test_a_warm_start_that_jumps_over_the_mark_is_an_error() -> None:
    with pytest.raises(WarmStartError, match=r"jumped to 0\.900, above warm_start\.fail_above=0\.5"):
        run_warm_start([0.1, 0.9], stop_at=0.35, fail_above=0.5)


def test_a_warm_start_that_never_arrives_is_an_error() -> None:
    with pytest.raises(WarmStartError, match=r"stop_at=0\.35 within warm_start\.max_steps=10"):
        run_warm_start([0.1] * 5, stop_at=0.35)


def test_every_algorithm_may_average_by_prompt() -> None:
    """The column that it needs is made wherever mini-batches are."""
    sampling = SamplingParams(max_new_tokens=8, n=2)
    for name, recipe in RECIPES.items():
        if "aggregation" not in recipe.config.model_fields:
            continue
        config = recipe.config(aggregation="prompt-mean")
        flow = derive_dataflow(recipe, config, sampling, num_prompts=8)
        (update,) = (call for call in flow.calls if call.method == "update_actor")
        assert "group_tokens" in update.reads, name


def test_what_reads_old_log_probs_before_the_update_has_them() -> None:
    config = RECIPES["distillation"].config()
    assert config.old_source == "recomputed"
    problems = list(config.model_copy(update={"old_logprobs": "current"}).find_contradictions())
    reason = "algorithm.signal = 'sampled' reads them before the update. Use 'recomputed'"
    assert problems == [f"algorithm.old_logprobs = 'current': {reason}"]


@pytest.mark.parametrize(
    ("keys", "bounds"),
    [
        ({"correction": "tis"}, (0.0, 2.0)),
        ({"correction": "icepop"}, (0.5, 5.0)),
        ({"correction": "icepop", "correction_low": 0.0, "correction_high": 9.0}, (0.0, 9.0)),
        ({"correction": "sequence_mask"}, (0.999, 1.002)),
        ({"correction": "sequence_mask", "correction_statistic": "product"}, (0.0, 3.0)),
    ],
)
def test_a_correction_has_the_bounds_of_its_kind(keys: dict[str, Any], bounds: tuple[float, float]) -> None:
    config = RECIPES["grpo"].config(**keys)
    assert config.correction_bounds == bounds
    assert not list(config.find_contradictions())


def test_bounds_that_keep_no_weight_are_refused_by_their_keys() -> None:
    config = RECIPES["grpo"].config(correction="tis", correction_low=3.0)
    (problem,) = config.find_contradictions()
    assert problem.startswith("algorithm.correction_low = 3.0: algorithm.correction_high = 2.0 is not above it. ")
