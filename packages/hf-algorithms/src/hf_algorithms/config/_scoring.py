"""Sections of what scores responses: `[reward]` and `[cost]`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from hf_algorithms.config._section import Positive, Section, UserPath
from hf_algorithms.rewards import Style

__all__ = ["CostConfig", "FunctionConfig", "RewardConfig", "ScorerConfig"]


class FunctionConfig(Section):
    """`[[reward.functions]]` and `[[cost.functions]]`: one of several functions."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] = ""
    """Names its curve, `reward/NAME/mean`, or `cost/NAME/mean`. Left out: the last part of `function`."""
    function: str
    """`module:function`, `file.py:function`, or the URL of a server."""
    weight: Annotated[float, Field(ge=-1e30, le=1e30)] = 1.0
    """Of its scores in the sum; 0: a curve alone."""
    deadline_s: Positive = 30.0
    """For one response; a call for a group has as many times that. Then its responses have no score."""
    style: Style = "auto"
    """Convention of its parameters; `auto`: the one that their names show."""

    @classmethod
    def of(cls, function: str) -> FunctionConfig:
        """Returns a function alone, named after the last part of `module:function` or of a URL."""
        return cls(function=function)

    @model_validator(mode="before")
    @classmethod
    def _name_after_function(cls, given: Any) -> Any:
        function = given.get("function") if isinstance(given, Mapping) and "name" not in given else None
        if not isinstance(function, str):
            return given
        last = _name_server(function) if "://" in function else function.rpartition(":")[2]
        return {"name": re.sub(r"[^\w.-]+", "_", last) or "function", **given}


class ScorerConfig(Section):
    """`[reward.model]`, `[cost.model]`: a model that scores responses next to functions, or in their place."""

    path: UserPath
    """Directory or hub name of a sequence classifier with one label, or of a critic; `hybridflow reward-model` makes
    one. It may have another tokenizer than the actor.
    """
    weight: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    """Multiplies the model's score in the sum of all scores."""


class _ScoringConfig(Section):
    """Keys that `[reward]` and `[cost]` share."""

    functions: tuple[FunctionConfig, ...] = Field(default=(), strict=False)
    """Several functions, each a table `[[reward.functions]]` or `[[cost.functions]]`: their weighted sum counts. In
    place of `function`.
    """
    processes: Annotated[int, Field(ge=0, le=1 << 10)] | None = None
    """Processes that call functions; left out: as many as the machine has cores. 0: functions run in the worker itself,
    for debuggers, and have no deadline.
    """
    allowed_hosts: tuple[str, ...] = Field(default=(), strict=False)
    """Hosts that a function's URL may name in addition to this machine's."""
    model: ScorerConfig | None = None
    """`path` and `weight` of a model, whose score is added to those of functions."""

    @field_validator("functions")
    @classmethod
    def _refuse_equal_names(cls, functions: tuple[FunctionConfig, ...]) -> tuple[FunctionConfig, ...]:
        names = [each.name for each in functions]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two functions are named {name!r}. Set another name for one")
        return functions

    def list_unwritten(self) -> set[str]:
        """Keys that were left out next to others which take their place: to write them would change the rest."""
        return {"function"} if self.functions else set()

    @model_serializer(mode="wrap")
    def _leave_out_unwritten(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves such keys out, so that the written file reads back."""
        unwritten = self.list_unwritten()
        return {key: value for key, value in write(self).items() if key not in unwritten}


class RewardConfig(_ScoringConfig):
    """`[reward]`: functions that score responses, one number each."""

    function: str = "hf_algorithms.rewards:exact_match"
    """Function that training maximises: `module:function`, `file.py:function`, or the URL of a server. Left out next
    to `[reward.model]`: the model alone.
    """
    metric: str = "hf_algorithms.rewards:exact_match"
    """Function that evaluation averages: 1 for a correct response, 0 for an incorrect one. `model`: the score of
    `[reward.model]`, also where all functions are left out.
    """

    def list_functions(self) -> tuple[FunctionConfig, ...]:
        """The functions that make the score; `function` alone is named after itself."""
        is_alone = self.model is not None and "function" not in self.model_fields_set
        return self.functions or (() if is_alone else (FunctionConfig.of(self.function),))

    @property
    def evaluates_model(self) -> bool:
        """True if evaluation averages the scores of the model."""
        is_alone = not self.model_fields_set & {"function", "functions", "metric"}
        return self.model is not None and (self.metric == "model" or is_alone)

    @property
    def metric_name(self) -> str:
        """Names the metric in `eval/SET/NAME`."""
        return "model" if self.evaluates_model else FunctionConfig.of(self.metric).name

    def list_unwritten(self) -> set[str]:
        """As of every such section, and the functions that were left out next to a model."""
        function = set() if self.list_functions() and not self.functions else {"function"}
        return function | ({"metric"} if self.evaluates_model and self.metric != "model" else set())


class CostConfig(_ScoringConfig):
    """`[cost]`: what a constrained algorithm keeps below a limit."""

    function: str | None = None
    """Function like a reward's; above 0 for what is unwanted."""

    def list_functions(self) -> tuple[FunctionConfig, ...]:
        """The functions that make the cost."""
        return self.functions or (() if self.function is None else (FunctionConfig.of(self.function),))


def _name_server(url: str) -> str:
    """The last part of the path, or the host: what a user, a password or a query says has no place in a name."""
    try:
        parts = urlsplit(url)
    except ValueError:  # it is refused later, with the key
        return ""
    return parts.path.rpartition("/")[2] or parts.netloc.rpartition("@")[2]
