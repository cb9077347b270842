"""`[[evaluation]]`: named sets that a run evaluates, each with its own sampling and cadence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import Field, model_validator

from hf_algorithms.config._section import Section, UserPath
from hf_algorithms.recipes import Recipe, SupervisedRecipe
from hf_protocols.errors import ConfigError
from hf_protocols.validation import show

__all__ = ["EvaluationConfig", "find_wrong_sets", "refuse_evaluation"]

_LEAST_TEMPERATURE = 1e-6
"""Logits divided by less may overflow."""

_Count = Annotated[int, Field(ge=1, le=1 << 53)]


class EvaluationConfig(Section):
    """`[[evaluation]]`: one set of rows that a run generates from and scores; as many tables as there are sets."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    """Names its curves, `eval/NAME/METRIC`."""
    data: UserPath
    """Path, pattern or hub name of its rows; their columns are found as those of `data.train`."""
    metrics: tuple[str, ...] = Field(default=(), strict=False)
    """Functions like `reward.metric`, each with its curves; left out: `reward.metric` alone."""
    samples: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    """Responses to each row; with several there are also `/avg@K` and `/pass@K`."""
    temperature: Annotated[float, Field(ge=0, le=1e30)] = 0.0
    """Divides the logits; 0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draws among the likeliest tokens that together have this probability; 1: all tokens."""
    max_new_tokens: _Count | None = None
    """Tokens of a response at most; left out: `rollout.max_new_tokens`."""
    rows: _Count | None = None
    """Rows that are used, from the first; left out: `data.max_eval_rows`."""
    every: _Count | None = None
    """Iterations between two evaluations of the set; left out: `run.eval_every`. The last iteration has one."""

    @model_validator(mode="after")
    def _refuse_unusual_draws(self) -> EvaluationConfig:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples = {self.samples}: at temperature = 0 all would be equal. Set a temperature above 0"
            )
        if 0 < self.temperature < _LEAST_TEMPERATURE:
            raise ValueError(f"temperature = {self.temperature}: must be 0 or at least {_LEAST_TEMPERATURE}")
        return self


def find_wrong_sets(evaluations: Sequence[EvaluationConfig], *, has_metric: bool) -> Iterator[str]:
    """Yields a line for a name that two sets have, for that of a set of `[data]`, and for a set without a metric.

    Args:
        evaluations: of a configuration.
        has_metric: `reward.metric` is a function, which scores sets without metrics of their own.
    """
    names = [each.name for each in evaluations]
    for number, (name, each) in enumerate(zip(names, evaluations, strict=True)):
        key = f"evaluation[{number}]"
        if name in names[:number]:
            first = f"evaluation[{names.index(name)}]"
            yield f"{key}.name = {show(name)}: {first} has this name, too. Rename one"
        if name in ("train", "validation", "test"):
            yield f"{key}.name = {show(name)}: is that of the rows of data.{name} in metrics. Rename the set"
        if not each.metrics and not has_metric:
            yield f"{key}.metrics is missing: [reward] names no metric function. Set it"


def refuse_evaluation(recipe: Recipe, unknown: Sequence[str]) -> None:
    """Refuses sets of a recipe whose model generates nothing.

    Args:
        recipe: of the configuration.
        unknown: keys that it does not know, such as `evaluation[0].name`.

    Raises:
        ConfigError: if they are those of a set.
    """
    refuses = isinstance(recipe, SupervisedRecipe) and "evaluation" in recipe.unused
    if refuses and any(key.startswith("evaluation[") for key in unknown):
        raise ConfigError(
            f"[[evaluation]]: the model of {recipe.name} generates nothing that a metric could score. Remove it; the "
            "pairs of data.validation are evaluated every run.eval_every iterations"
        )
