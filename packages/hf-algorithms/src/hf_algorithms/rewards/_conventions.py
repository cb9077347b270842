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
Style = Literal["auto", "hybridflow", "trl", "verl", "verl_batch", "openrlhf", "verifiers"]

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
    "verl_batch": Convention(
        named_by="solution_strs",
        positional=("data_sources", "solution_strs", "ground_truths", "extra_infos"),
        offers=("response_ids", "truncated"),
        per_sample=False,
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

_OTHER_FORM = {"verl": "verl_batch", "verl_batch": "verl"}
"""verl calls a function for one response or for a batch; the function's parameters show the form."""


@dataclass(frozen=True)
class Binding:
    """The call of one function: its convention and its parameters.

    Attributes:
        style: key of `CONVENTIONS`.
        keywords: parameters that get a value by name; None: those of the convention, by position.
        needed: of the keywords, those without a default.
        takes_all: further names are passed as well.
        filled: names of the parameters that are filled by position.
    """

    style: str
    keywords: tuple[str, ...] | None
    needed: frozenset[str] = frozenset()
    takes_all: bool = False
    filled: frozenset[str] = frozenset()

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
        ConfigError: for parameters of two conventions, or of none; for names near those of a convention, which are not
            filled by position.
    """
    try:
        signature = _signature(function)
    except (TypeError, ValueError):  # written in C, and says nothing of its parameters
        return Binding("hybridflow" if style == "auto" else style, None)
    parameters = signature.parameters.values()
    given = [each.name for each in parameters if each.kind in _NAMED]
    if style == "auto":
        style = _detect(what, signature, given, style_key)
    style = _choose_form(style, given)
    convention = CONVENTIONS[style]
    needed = frozenset(each.name for each in parameters if each.kind in _NAMED and each.default is each.empty)
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    only_by_position = any(each.kind is inspect.Parameter.POSITIONAL_ONLY for each in parameters)
    if not only_by_position and (convention.names.intersection(given) or (takes_all and not needed)):
        return Binding(style, tuple(given), needed, takes_all)
    _refuse_near_names(what, signature, style)
    try:
        bound = signature.bind(*convention.positional)
    except TypeError as error:
        raise ConfigError(
            f"{what} cannot be called: its arguments are {signature}, {error}. Write it as "
            f"def f({', '.join(convention.positional)}){f', or set {style_key}' if style_key else ''}"
        ) from None
    return Binding(style, None, takes_all=takes_all, filled=frozenset(bound.arguments))


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


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


def _choose_form(style: Style, given: Sequence[str]) -> Style:
    other: Any = _OTHER_FORM.get(style)
    is_other = other and CONVENTIONS[other].named_by in given and CONVENTIONS[style].named_by not in given
    return other if is_other else style


def _refuse_near_names(what: str, signature: inspect.Signature, style: str) -> None:
    """Refuses to fill by position what has a convention's name, or its plural or singular: the value would be another.

    Allowed are a name at its own place, and any name of answers at the place of the answers.
    """
    places = (*CONVENTIONS[style].positional, *[""] * len(signature.parameters))
    names = [each.name for each in signature.parameters.values() if each.kind in _BY_POSITION]
    names += [each.name for each in signature.parameters.values() if each.kind is each.KEYWORD_ONLY]
    known = {_singular(name) for each in CONVENTIONS.values() for name in (*each.names, *ANSWER_NAMES)}
    near = [(name, place) for name, place in zip(names, places, strict=False) if _singular(name) in known]
    if all(name == place or {name, place} <= ANSWER_NAMES for name, place in near):
        return
    shown = [name for name, _ in near]
    best = max(CONVENTIONS.values(), key=lambda each: _count_near(shown, each.positional))
    raise ConfigError(
        f"{what} has the parameters {', '.join(shown)}, whose names are near those of a convention but not all of one: "
        f"{signature}. Such parameters are not filled by position. Write it as def f({', '.join(best.positional)})"
    )


def _count_near(names: Sequence[str], positional: Sequence[str]) -> tuple[int, int]:
    """Names that are near those of a convention, and those that are equal."""
    singular = {_singular(name) for name in positional}
    return sum(_singular(name) in singular for name in names), len({*names} & {*positional})


def _singular(name: str) -> str:
    return f"{name[:-3]}y" if name.endswith("ies") else name.removesuffix("s")
