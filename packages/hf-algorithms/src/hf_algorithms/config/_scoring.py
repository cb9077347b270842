"""The base of sections, and those of rewards and costs."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
)

from hf_algorithms.rewards import Style

__all__ = ["CostConfig", "FunctionConfig", "Positive", "RewardConfig", "Section"]

Positive = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
"""It fits a float32 with room for products."""


class Section(BaseModel):
    """A table of the file: frozen, and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class FunctionConfig(Section):
    """`[[reward.functions]]` and `[[cost.functions]]`: one of several functions."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    """Names its curve, `reward/NAME/mean`."""
    function: str
    """`module:function`, `file.py:function`, or the URL of a server."""
    weight: Annotated[float, Field(ge=-1e30, le=1e30)] = 1.0
    """Of its scores in the sum; 0: a curve alone."""
    deadline_s: Positive = 30.0
    """For one response; a call for a group has as many times that. Then its responses have no score."""
    style: Style = "auto"
    """Convention of its parameters; `auto`: the one that their names show."""


class _ScoringConfig(Section):
    """What `[reward]` and `[cost]` have in common."""

    functions: tuple[FunctionConfig, ...] = Field(default=(), strict=False)
    """Several functions, each a table `[[reward.functions]]`: their weighted sum counts. In place of `function`."""
    processes: Annotated[int, Field(ge=0, le=1 << 10)] | None = None
    """Processes that call functions; left out: as many as the machine has cores. 0: functions run in the worker itself,
    for debuggers, and have no deadline.
    """
    allowed_hosts: tuple[str, ...] = Field(default=(), strict=False)
    """Hosts that a function's URL may name in addition to this machine's."""

    @field_validator("functions")
    @classmethod
    def _refuse_equal_names(cls, functions: tuple[FunctionConfig, ...]) -> tuple[FunctionConfig, ...]:
        names = [each.name for each in functions]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two functions are named {name!r}. Rename one")
        return functions

    @model_serializer(mode="wrap")
    def _leave_out_the_short_form(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves `function` out next to `functions`, so that the written file reads back."""
        return {key: value for key, value in write(self).items() if key != "function" or not self.functions}


class RewardConfig(_ScoringConfig):
    """`[reward]`: functions that score responses, one number each."""

    function: str = "hf_algorithms.rewards:exact_match"
    """Function that training maximises: `module:function`, `file.py:function`, or the URL of a server."""
    metric: str = "hf_algorithms.rewards:exact_match"
    """Function that evaluation averages: 1 for a correct response, 0 for an incorrect one."""

    def list_functions(self) -> tuple[FunctionConfig, ...]:
        """The functions that make the score; `function` alone is named after itself."""
        return self.functions or (_name_function(self.function),)

    @property
    def metric_name(self) -> str:
        """Names the metric in `eval/SET/NAME`."""
        return _name_function(self.metric).name


class CostConfig(_ScoringConfig):
    """`[cost]`: what a constrained algorithm keeps below a limit."""

    function: str | None = None
    """Function like a reward's; above 0 for what is unwanted."""

    def list_functions(self) -> tuple[FunctionConfig, ...]:
        """The functions that make the cost."""
        return self.functions or (() if self.function is None else (_name_function(self.function),))


def _name_function(function: str) -> FunctionConfig:
    name = re.sub(r"[^\w.-]+", "_", function.rpartition("/" if "://" in function else ":")[2]) or "function"
    return FunctionConfig(name=name, function=function)
