"""Sections of what scores responses: `[reward]` and `[cost]`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from hf_algorithms.config._section import Section, UserPath

__all__ = ["CostConfig", "RewardConfig", "ScorerConfig"]


class ScorerConfig(Section):
    """`[reward.model]`, `[cost.model]`: a model that scores responses next to functions, or in their place."""

    path: UserPath
    """Directory or hub name of a sequence classifier with one label, or of a critic; `hybridflow reward-model` makes
    one. It may have another tokenizer than the actor.
    """
    weight: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    """Multiplies the model's score in the sum of all scores."""


class RewardConfig(Section):
    """`[reward]`: Python functions `module:function` of (prompts, responses, answers), one number a response."""

    function: str = "hf_algorithms.rewards:exact_match"
    """Function that training maximises. Left out next to `[reward.model]`: the model alone."""
    metric: str = "hf_algorithms.rewards:exact_match"
    """Function that evaluation averages: 1 for a correct response, 0 for an incorrect one. `model`: the score of
    `[reward.model]`, also where both functions are left out.
    """
    model: ScorerConfig | None = None
    """`path` and `weight` of a reward model, whose score is added to the function's."""

    @property
    def uses_function(self) -> bool:
        """True if `function` is part of the score."""
        return self.model is None or "function" in self.model_fields_set

    @property
    def evaluates_model(self) -> bool:
        """True if evaluation averages the scores of the model."""
        is_left_out = not self.model_fields_set & {"function", "metric"}
        return self.model is not None and (self.metric == "model" or is_left_out)

    @property
    def metric_name(self) -> str:
        """Name of what evaluation averages, in metrics."""
        return "model" if self.evaluates_model else self.metric.rpartition(":")[2]

    @model_serializer(mode="wrap")
    def _leave_out_unused_functions(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves functions out that were left out next to a model, so that the written file reads back."""
        unused = {"function": not self.uses_function, "metric": self.evaluates_model and self.metric != "model"}
        return {key: value for key, value in write(self).items() if not unused.get(key)}


class CostConfig(Section):
    """`[cost]`: what a constrained algorithm keeps below a limit."""

    function: str | None = None
    """Python function `module:function` like a reward's; above 0 for what is unwanted."""
    model: ScorerConfig | None = None
    """`path` and `weight` of a cost model, whose score is added to the function's."""
