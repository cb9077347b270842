"""Recipes of the tasks that separate two algorithms: shipped steps with more metrics, and GRPO on old samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from hf_algorithms import Recipe
from hf_algorithms.jagged import pad_rows
from hf_algorithms.recipes import RECIPES, StepContext, build_clip, generate_scored, train_by_scores
from hf_algorithms.recipes.grpo import GRPOConfig
from hf_algorithms.workers import AdvantageWorker
from hf_protocols import RANK_ZERO, register

if TYPE_CHECKING:
    from tensordict import TensorDict

    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture, MetricsFuture

__all__ = ["DAPO", "DR_GRPO", "GRPO", "MAXRL", "STALE", "MeasuringWorker", "StaleConfig"]

_SCORED = ("response_mask", "scores", "row_id?", "group_id?", "finish_reason?")
_LOGPROBS = ("old_logprobs?", "ref_logprobs?", "rollout_logprobs?")


class MeasuringWorker(AdvantageWorker):
    """Reports the length of wrong responses, and scores by rows of the training set."""

    @register(protocol=RANK_ZERO, returns="metrics", reads=(*_SCORED, *_LOGPROBS))
    def compute_metrics(
        self, batch: TensorDict, *, compares_sampler: bool = True, counts_responses: bool = True
    ) -> dict[str, tuple[float, float]]:
        """Returns the shipped metrics, and three more.

        `wrong/tokens` is the mean number of tokens of responses with score 0, `right/tokens` that of the others.
        `hard/score` is the mean score of rows with an odd number in the training set, which hard tasks have.
        """
        metrics = super().compute_metrics(batch, compares_sampler=compares_sampler, counts_responses=counts_responses)
        if not counts_responses:
            return metrics
        lengths = pad_rows(batch["response_mask"]).sum(dim=1).double()
        scores = batch["scores"]
        for name, rows in {"wrong": scores <= 0, "right": scores > 0}.items():
            metrics[f"{name}/tokens"] = (float(lengths[rows].sum()), float(rows.sum()))
        if "row_id" in batch:
            is_hard = batch["row_id"] % 2 == 1
            metrics["hard/score"] = (float(scores[is_hard].sum()), float(is_hard.sum()))
        return metrics


def _measure(name: str) -> Recipe:
    """Returns the shipped recipe with a `MeasuringWorker`."""
    shipped = RECIPES[name]
    worker = f"{__name__}:{MeasuringWorker.__name__}"
    return replace(
        shipped,
        roles=tuple(replace(role, worker=worker) if role.name == "advantage" else role for role in shipped.roles),
    )


GRPO, DR_GRPO, MAXRL, DAPO = (_measure(name) for name in ("grpo", "dr_grpo", "maxrl", "dapo"))


class StaleConfig(GRPOConfig):
    """`[algorithm]` of `STALE`: GRPO's, and the age of the samples."""

    name: Literal["stale_grpo"] = "stale_grpo"  # type: ignore[assignment]
    sample_age: int = 4
    """Iterations between the drawing of a batch and the update on it."""


def step_stale(roles: Roles, prompts: BatchFuture, config: StaleConfig, context: StepContext) -> Sequence[Any]:
    """One iteration: draws a batch, and trains on the one that was drawn `sample_age` iterations ago."""
    from hf_algorithms.advantages import GroupAdvantage

    batch = generate_scored(roles, prompts, context)
    fresh: MetricsFuture = roles.advantage.compute_metrics(batch)
    waiting = context.state.setdefault("waiting", [])
    waiting.append(batch)
    if 0 < context.iteration <= config.sample_age:
        return [fresh]
    estimator = GroupAdvantage(std_ddof=config.std_ddof, std_eps=config.std_eps)
    _, *updates = train_by_scores(roles, waiting.pop(0), config, context, estimator, build_clip(config))
    return [fresh, *updates]


STALE = Recipe(name="stale_grpo", config=StaleConfig, roles=GRPO.roles, step=step_stale)
