"""Conventions of reward functions: which parameters each has, and how a function's convention is read off them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hf_algorithms.rewards._trainer import TRAINER_VALUES
from hf_protocols.errors import ConfigError
from hf_protocols.validation import show

__all__ = ["ANSWER_NAMES", "CONVENTIONS", "Binding", "Convention", "Style", "bind_function"]

_STYLE_KEY = "style of [[reward.functions]]"
Style = Literal["auto", "hybridflow", "trl", "verl", "openrlhf", "verifiers"]

ANSWER_NAMES = frozenset(
    {"answer", "answers", "solution", "solutions", "ground_truth", "ground_truths"}
    | {"label", "labels", "target", "targets", "reference", "references"}
)
"""Parameters that get the answers where the data has no column of that name."""


@dataclass(frozen=True)
class Convention:
    """One way to write a reward function.

    Attributes:
        named_by: a parameter of this name shows the convention.
        positional: what a function gets whose parameters have other names, in order.
        offers: further parameters that it may name, in addition to the columns of the data.
        per_sample: it is called for one response, not for a group.
    """

    named_by: str
    positional: tuple[str, ...]
    offers: tuple[str, ...]
    per_sample: bool

    @property
    def names(self) -> frozenset[str]:
        """All parameters that are offered."""
        return frozenset(self.positional + self.offers)


CONVENTIONS: Mapping[str, Convention] = {
    "hybridflow": Convention(
        named_by="responses",
        positional=("prompts", "responses", "answers"),
        offers=("messages", "prompt_ids", "response_ids", "truncated"),
        per_sample=False,
    ),
    "trl": Convention(
        named_by="completions",
        positional=("prompts", "completions"),
        offers=("prompt_ids", "completion_ids", "response_ids", "truncated", *TRAINER_VALUES),
        per_sample=False,
    ),
    "verl": Convention(
        named_by="solution_str",
        positional=("data_source", "solution_str", "ground_truth", "extra_info"),
        offers=("response_ids", "truncated"),
        per_sample=True,
    ),
    "openrlhf": Convention(
        named_by="queries",
        positional=("queries", "prompts", "labels"),
        offers=("prompt_ids", "response_ids", "truncated"),
        per_sample=False,
    ),
    "verifiers": Convention(
        named_by="completion",
        positional=("prompt", "completion", "answer", "state"),
        offers=("info", "prompt_ids", "response_ids", "truncated"),
        per_sample=True,
    ),
}
"""By name, as `style` gives it."""


@dataclass(frozen=True)
class Binding:
    """The call of one function: its convention and its parameters.

    Attributes:
        style: key of `CONVENTIONS`.
        keywords: parameters that get a value by name; None: those of the convention, by position.
        needed: of the keywords, those without a default.
        takes_all: further names are passed as well.
    """

    style: str
    keywords: tuple[str, ...] | None
    needed: frozenset[str] = frozenset()
    takes_all: bool = False

    @property
    def convention(self) -> Convention:
        """Facts of the style."""
        return CONVENTIONS[self.style]

    def find_unknown(self, columns: Collection[str]) -> list[str]:
        """Returns parameters that neither the convention nor the data has a value for."""
        known = self.convention.names | set(columns) | ANSWER_NAMES
        return sorted(self.needed - known)

    def find_answers(self, answer_name: str) -> list[str]:
        """Returns parameters that get the answers of the data, which a function asks for by naming them."""
        return sorted((self.needed & {answer_name, *ANSWER_NAMES}) - self.convention.names)


def bind_function(
    what: str, function: Callable[..., Any], style: Style = "auto", *, style_key: str | None = _STYLE_KEY
) -> Binding:
    """Reads off a function's parameters how it is called. By its signature only: it does not run.

    Args:
        what: names the function in messages: key and value of the configuration.
        function: a user's.
        style: a convention by name; `auto`: the one that the parameters show.
        style_key: the user's name of the style in messages; None: the function has no such key.

    Raises:
        ConfigError: for parameters of two conventions, or of none.
    """
    try:
        signature = _signature(function)
    except (TypeError, ValueError):  # written in C, and says nothing of its parameters
        return Binding("hybridflow" if style == "auto" else style, None)
    parameters = signature.parameters.values()
    given = [each.name for each in parameters if each.kind in _NAMED]
    if style == "auto":
        style = _detect(what, signature, given, style_key)
    convention = CONVENTIONS[style]
    needed = frozenset(each.name for each in parameters if each.kind in _NAMED and each.default is each.empty)
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    only_by_position = any(each.kind is inspect.Parameter.POSITIONAL_ONLY for each in parameters)
    if not only_by_position and (convention.names.intersection(given) or (takes_all and not needed)):
        return Binding(style, tuple(given), needed, takes_all)
    try:
        signature.bind(*convention.positional)
    except TypeError as error:
        raise ConfigError(
            f"{what} cannot be called: its arguments are {signature}, {error}. Write it as "
            f"def f({', '.join(convention.positional)}){f', or set {style_key}' if style_key else ''}"
        ) from None
    return Binding(style, None)


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _signature(function: Any) -> inspect.Signature:
    """The signature of the outermost function; of one that passes all arguments on, that of the inner one."""
    signature = inspect.signature(function, follow_wrapped=False)
    passes_on = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in signature.parameters.values())
    wrapped = getattr(function, "__wrapped__", None)
    return _signature(wrapped) if passes_on and wrapped is not None else signature


def _detect(what: str, signature: inspect.Signature, given: Sequence[str], style_key: str | None) -> Style:
    found: list[Any] = [name for name, each in CONVENTIONS.items() if each.named_by in given]
    if len(found) > 1:
        shown = " and ".join(f"{CONVENTIONS[name].named_by} ({name})" for name in found)
        remedy = f"Set {style_key} to {' or '.join(map(show, found))}" if style_key else "Rename one of the two"
        raise ConfigError(f"{what} has parameters with names of two conventions, {shown}: {signature}. {remedy}")
    style: Style = found[0] if found else "hybridflow"
    return style
