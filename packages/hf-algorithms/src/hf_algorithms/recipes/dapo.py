"""DAPO: GRPO with a higher upper clip, dynamic sampling, token-mean and an optional length term (Yu et al. 2025).

An iteration drops the groups whose scores are all equal and draws as many prompts again, at most `max_refills` times
and while the data set has as many rows that the iteration has not drawn. Surplus groups are dropped, as the ledger
says. After the last refill it trains on what there is. Without any group, or with fewer responses than ranks, it makes
no update. Metrics: `group/filtered`, `group/refills`, and `actor/skipped_steps` for an iteration without an update. The
metrics of scores and responses are of all that were drawn, before the length term.

Deviations from the paper:

- `aggregation = "token-mean"` is what its code does; its equation 8 divides by the tokens of each prompt's group, which
  `prompt-mean` does;
- the standard deviation divides by n - 1, and 1e-6 is added to it;
- the length term is left out by default; `overlong_buffer` adds it;
- the logarithm of the ratio is cut at -20 and 20;
- the metric of dynamic sampling is the score itself, before the length term, unless `filter_metric` names another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from hf_algorithms.recipes._config import ClipKeys, Coefficient, LengthKeys, PolicyConfig, StdKeys
from hf_algorithms.recipes._recipe import Recipe, StepContext
from hf_algorithms.recipes._roles import POLICY_ROLES
from hf_algorithms.recipes._steps import (
    build_clip,
    build_group_advantage,
    generate,
    generate_scored,
    train_by_scores,
)
from hf_protocols import BatchError, ConfigError
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture, MetricsFuture, ObjectFuture

__all__ = ["DAPO", "DAPOConfig", "fill", "step"]

_NOT_METRICS = frozenset(
    {"answer", "group_id", "prompt_id", "prompt_ids", "row_id", "response_ids", "response_mask", "rollout_logprobs"}
    | {"sample_id", "weight_version"}
)


_NAMED = "reward/"
"""Before the name of one of several rewards."""
_OF_MODEL = "reward/model"
"""Names the score of `[reward.model]`."""


class DAPOConfig(LengthKeys, StdKeys, ClipKeys, PolicyConfig):
    """`[algorithm]` with `name = "dapo"`."""

    name: Literal["dapo"] = "dapo"
    clip_high: Coefficient = 0.28

    def find_contradictions(self) -> Iterator[str]:
        """Yields one line for every pair of keys that cannot go together."""
        yield from super().find_contradictions()
        if self.group_of_one != "error":
            yield "algorithm.group_of_one: dynamic sampling drops groups of one. Remove it"
        if self.filter_metric in _NOT_METRICS:
            yield (
                f"algorithm.filter_metric = {show(self.filter_metric)}: the column has no number that differs between "
                "the responses to a prompt. Use 'scores', 'metric_scores' or 'response_tokens'"
            )


def step(
    roles: Roles, prompts: BatchFuture, config: DAPOConfig, context: StepContext
) -> Sequence[MetricsFuture | Mapping[str, float]]:
    """Trains on the groups whose scores differ, after refills."""
    from hf_algorithms.advantages import LengthTerm
    from hf_algorithms.roles import least_rows

    batch, metrics = fill(roles, prompts, config, context)
    if batch is not None and batch.num_rows < prompts.num_rows * context.sampling.n:
        # every mini-batch holds whole groups, and a row for each rank
        groups_each = -(-least_rows(roles.group("actor"), "update_actor") // context.sampling.n)
        parts = min(config.mini_batches, batch.num_rows // context.sampling.n // groups_each)
        reference = roles.group("reference") if config.needs_reference else None
        has_rows = reference is None or batch.num_rows >= least_rows(reference, "compute_ref_logprobs")
        batch = batch if parts and has_rows else None
        config = config.model_copy(update={"mini_batches": parts})
    if batch is None:
        return [*metrics, {"actor/skipped_steps": 1.0}]
    if config.overlong_buffer:
        term = LengthTerm(max_tokens=context.sampling.max_new_tokens, buffer=config.overlong_buffer)
        batch = batch.union(roles.advantage.add_length_term(batch, term))
    estimator = build_group_advantage(config)
    return [
        *metrics,
        *train_by_scores(roles, batch, config, context, estimator, build_clip(config), counts_responses=False),
    ]


def fill(
    roles: Roles, prompts: BatchFuture, config: DAPOConfig, context: StepContext
) -> tuple[BatchFuture | None, list[MetricsFuture | Mapping[str, float]]]:
    """Returns the responses of groups whose scores differ, as many groups as there are prompts, and metrics.

    The metrics are of all responses, dropped ones included, and count the groups. None stands for no group at all.
    While a dataflow is traced all groups are kept.
    """
    samples, wanted = context.sampling.n, prompts.num_rows
    found: BatchFuture | None = None
    drawn: BatchFuture | None = None
    num_kept = num_drawn = num_filtered = refills = 0
    fresh = prompts
    while True:
        batch = _generate_scored(roles, fresh, config, context)
        drawn = batch if drawn is None else drawn.concat(batch)
        groups = range(num_drawn, num_drawn + fresh.num_rows)
        kept = set(context.read(_select(roles, batch, config), while_tracing=list(groups)))
        rows = [
            number * samples + sample
            for number, group in enumerate(groups)
            if group in kept
            for sample in range(samples)
        ]
        rows = rows[: (wanted - num_kept) * samples]
        filtered = [group for group in groups if group not in kept]
        context.note_filtered(filtered)
        num_filtered += len(filtered)
        num_drawn += len(groups)
        num_kept += len(rows) // samples
        if rows:
            found = batch.rows(rows) if found is None else found.concat(batch.rows(rows))
        if num_kept == wanted or refills == config.max_refills or context.count_prompts_left() < wanted:
            break
        refills += 1
        fresh = context.more_prompts(wanted)
    counts = {"group/filtered": float(num_filtered), "group/refills": float(refills)}
    return found, [roles.advantage.compute_metrics(drawn), counts]


def _generate_scored(roles: Roles, prompts: BatchFuture, config: DAPOConfig, context: StepContext) -> BatchFuture:
    """Scored responses; where groups are compared by a reward model, its scores stay in the batch."""
    from hf_algorithms.roles import call_keeping_scores, is_scored

    if config.filter_metric != _OF_MODEL or not is_scored(roles.group("reward"), "compute_reward"):
        return generate_scored(roles, prompts, context)
    batch = call_keeping_scores(roles.group("reward"), "compute_reward", generate(roles, prompts, context))
    context.note_scored(batch)
    return batch


def _select(roles: Roles, batch: BatchFuture, config: DAPOConfig) -> ObjectFuture:
    from hf_algorithms.advantages import FilterMetric

    if config.filter_metric == "scores":
        return roles.advantage.select_groups(batch)
    column = config.filter_metric
    if column == "metric_scores":
        batch = batch.union(roles.reward.compute_metric(batch))
    elif column.startswith(_NAMED):
        batch, column = _add_named(roles, batch, config)
    try:
        return roles.advantage.select_groups(batch, FilterMetric(column))
    except BatchError as error:
        label = f"algorithm.filter_metric = {show(config.filter_metric)}"
        raise ConfigError(f"{label}: the responses have no such column. {error}") from None


def _add_named(roles: Roles, batch: BatchFuture, config: DAPOConfig) -> tuple[BatchFuture, str]:
    """The batch with the scores of the reward that `filter_metric` names, and their column.

    A worker of one's own names rewards by the columns that its `compute_reward` writes.
    """
    from hf_algorithms.roles import is_scored

    name, methods = config.filter_metric.removeprefix(_NAMED), roles.group("reward").methods
    writes = methods["compute_reward"].writes
    written = [each for each in writes if each != "scores"] if isinstance(writes, tuple) else []
    if name in written:
        return batch, name
    if config.filter_metric == _OF_MODEL and is_scored(roles.group("reward"), "compute_reward"):
        return batch, "model_scores"
    if "compute_named_reward" in methods:
        return batch.union(roles.reward.compute_named_reward(batch, name)), "named_scores"
    known = ", ".join(f"{_NAMED}{each}" for each in written) or "none"
    raise ConfigError(
        f"algorithm.filter_metric = {show(config.filter_metric)}: no reward has this name. Use one of {known}"
    )


DAPO = Recipe(name="dapo", config=DAPOConfig, roles=POLICY_ROLES, step=step)
