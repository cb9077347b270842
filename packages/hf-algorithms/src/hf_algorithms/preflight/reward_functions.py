"""Checks of reward functions before a run starts: their signatures, and the answers that they can read."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hf_algorithms.data import locate_row
from hf_algorithms.rewards import (
    Binding,
    Style,
    SupportsAnswerCheck,
    bind_function,
    check_address,
    check_connection,
    get_users_function,
    imports_from,
    is_url,
    load_function,
)
from hf_algorithms.url_secrets import hide_secrets
from hf_controller import Terminated
from hf_protocols.errors import ConfigError, DataError
from hf_protocols.foreign_code import Caught, raised_as
from hf_protocols.validation import shorten, shorten_list, show

if TYPE_CHECKING:
    from hf_algorithms.config import Config
    from hf_algorithms.data import Row

__all__ = ["check_metric", "check_rewards", "check_servers", "describe_logs"]

_MOST_REASON = 300
_EVALUATED = ("validation", "test")


@dataclass(frozen=True)
class _Named:
    """A function as the configuration names it."""

    key: str
    function: str
    style: Style
    allowed_hosts: tuple[str, ...]
    sets: frozenset[str]

    @property
    def label(self) -> str:
        return f"{self.key} = {show(hide_secrets(self.function))}"

    @property
    def style_key(self) -> str | None:
        """The user's name of its style; None for a metric, whose convention its parameters alone show."""
        section, _, name = self.key.partition(".")
        return f"style of [[{section}.functions]]" if name.startswith("function") else None


@dataclass(frozen=True)
class _Checked:
    """Parameters of a function, and its need of answers."""

    binding: Binding
    check_answer: Callable[[str], object] | None
    needs_answers: bool


def check_rewards(config: Config, rows: Mapping[str, Sequence[Row]], *, search_path: Sequence[str] = ()) -> None:
    """Loads every function of `[reward]` and `[cost]`, and lets the functions check the answers of all rows.

    Args:
        config: names the functions and the files.
        rows: those that a run reads, by data set: `train`, `validation` and `test`; row i is line i + 1.
        search_path: folders where the functions' modules are looked for first.

    Raises:
        ConfigError: naming the key, for a function that is not found, that is of no convention, or that has a
            parameter without a value.
        DataError: naming file and line, for an answer that a function cannot read; and for data without any answer,
            with which a function compares.
    """
    for named in _list_functions(config):
        if is_url(named.function):
            _check_url(named)
            continue
        checked = _load_and_check(named, search_path)
        answer_name = str(config.data.answer_field)
        if rows:
            _check_parameters(named, checked.binding, answer_name, rows)
        remedy = f"Set data.answer_field, or set {named.key} to a function that needs no answers"
        for name in sorted(named.sets & rows.keys(), reverse=True):
            _check_presence(named, checked, config.data.describe(name), rows[name], answer_name, remedy)
        if checked.check_answer is not None:
            with imports_from(search_path):
                for path, longest in _rows_by_path(config, rows).items():
                    _check_answers(named, checked, path, longest)


def check_metric(
    key: str,
    function: str,
    rows: Sequence[Row],
    *,
    source: str,
    answer_name: str = "answer",
    allowed_hosts: tuple[str, ...] = (),
    search_path: Sequence[str] = (),
) -> None:
    """Loads one metric function, and lets it look at the answers of the rows that it will score.

    Args:
        key: that names the function, for messages.
        function: as the user wrote it.
        rows: of one set.
        source: where they come from, for messages.
        answer_name: of the answers in the data.
        allowed_hosts: that a URL may name in addition to this machine.
        search_path: folders where its module is looked for first.

    Raises:
        ConfigError, DataError: as `check_rewards` does.
    """
    named = _Named(key, function, "auto", allowed_hosts, frozenset())
    if is_url(function):
        try:
            check_address(function, allowed_hosts, key="reward.allowed_hosts")
            check_connection(function)
        except ConfigError as error:
            raise ConfigError(f"{key} = {error}") from None
        return
    checked = _load_and_check(named, search_path)
    _check_parameters(named, checked.binding, answer_name, {source: rows})
    remedy = "Name the column of the answers, or use a function that needs no answers"
    _check_presence(named, checked, source, rows, answer_name, remedy)
    if checked.check_answer is not None:
        with imports_from(search_path):
            _check_answers(named, checked, source, rows)


def _load_and_check(named: _Named, search_path: Sequence[str]) -> _Checked:
    """The function by its signature and attributes."""
    try:
        function = get_users_function(load_function(named.function, search_path=search_path))
    except ConfigError as error:
        raise ConfigError(f"{named.key} = {error}") from error
    with raised_as(
        lambda error: ConfigError(f"{named.label} cannot be inspected: {_describe(error)}. Write it as a function")
    ):
        return _Checked(
            _check_function(named, function),
            _find_check(named.label, function),
            bool(getattr(function, "needs_answers", False)),
        )


def check_servers(config: Config) -> None:
    """Connects to every server of `[reward]` and `[cost]` once.

    Args:
        config: whose functions `check_rewards` has accepted.

    Raises:
        ConfigError: naming the key, for a server that cannot be reached.
    """
    for named in _list_functions(config):
        if is_url(named.function):
            try:
                check_connection(named.function)
            except ConfigError as error:
                raise ConfigError(f"{named.key} = {error}") from None


def describe_logs(config: Config, *, search_path: Sequence[str] = ()) -> list[str]:
    """Returns a line for each function whose `log_extra` or `log_metric` a run cannot honour as TRL does.

    Args:
        config: whose functions `check_rewards` has accepted.
        search_path: as there.
    """
    lines = []
    for named in _list_functions(config):
        if is_url(named.function):
            continue
        function = get_users_function(load_function(named.function, search_path=search_path))
        keywords = bind_function(named.label, function, named.style).keywords or ()
        if "log_extra" in keywords and named.key.startswith("cost"):
            lines.append(f"{named.label}: the samples have no columns of costs, so log_extra has no effect")
        elif "log_extra" in keywords:
            lines.append(f"{named.label}: what it gives log_extra is kept for the rows of samples/ alone")
        if "log_metric" in keywords and named.function == config.reward.metric and not config.reward.evaluates_model:
            metric = replace(named, key="reward.metric").label
            lines.append(f"{metric}: evaluations keep its scores alone, so log_metric has no effect there")
    return lines


def _list_functions(config: Config) -> list[_Named]:
    """Every function once: costs, then rewards, then the metric."""
    reward = config.reward
    found: dict[tuple[str, tuple[str, ...]], _Named] = {}  # the same server may be allowed in one section alone
    for section, part in (("cost", config.cost), ("reward", reward)):
        for number, each in enumerate(part.list_functions()):
            key = f"{section}.functions[{number}].function" if part.functions else f"{section}.function"
            hosts = part.allowed_hosts if is_url(each.function) else ()
            named = _Named(key, each.function, each.style, hosts, frozenset({"train"}))
            found.setdefault((each.function, hosts), named)
    if not reward.evaluates_model:
        hosts = reward.allowed_hosts if is_url(reward.metric) else ()
        metric = _Named("reward.metric", reward.metric, "auto", hosts, frozenset(_EVALUATED))
        first = found.setdefault((reward.metric, hosts), metric)
        found[reward.metric, hosts] = replace(first, sets=first.sets | metric.sets)
    return list(found.values())


def _check_presence(
    named: _Named, checked: _Checked, source: str, rows: Sequence[Row], answer_name: str, remedy: str
) -> None:
    """Refuses a data set of which no row has an answer, if the function compares with answers or names them."""
    wanted = checked.binding.find_answers(answer_name)
    if not (checked.needs_answers or wanted) or any(row.answer is not None for row in rows):
        return
    if checked.needs_answers:
        raise DataError(f"{source}: no row has an answer, with which {named.label} compares responses. {remedy}")
    if absent := [name for name in wanted if not any(name in row.columns for row in rows)]:
        raise DataError(
            f"{source}: no row has an answer or a column {show(absent[0])}, which {named.label} has as a parameter. "
            f"{remedy}"
        )


def _check_url(named: _Named) -> None:
    try:
        check_address(named.function, named.allowed_hosts, key=f"{named.key.partition('.')[0]}.allowed_hosts")
    except ConfigError as error:
        raise ConfigError(f"{named.key} = {error}") from None


def _check_function(named: _Named, function: Callable[..., Any]) -> Binding:
    """By its signature only: nobody's code runs."""
    what = named.label
    if isinstance(function, type):
        raise ConfigError(f"{what} is a class. Name a function, or an instance with a method __call__")
    _refuse_generators(what, function)
    return bind_function(what, function, named.style, style_key=named.style_key)


def _check_parameters(named: _Named, binding: Binding, answer_name: str, rows: Mapping[str, Sequence[Row]]) -> None:
    """Refuses a parameter that neither the convention nor any row has a value for."""
    if not binding.find_unknown({answer_name}):  # most functions name no column: no row is read
        return
    columns = {name for part in rows.values() for row in part for name in row.columns}
    style = named.style_key
    if unknown := binding.find_unknown({*columns, answer_name}):
        raise ConfigError(
            f"{named.label} has the parameter {unknown[0]}, which nothing fills: the convention "
            f"{binding.style} does not offer it, and the data {_describe_columns(columns)}. Remove it, "
            + (f"make it a column of the data, or set {style}" if style else "or make it a column of the data")
        )


def _describe_columns(columns: Collection[str]) -> str:
    if not columns:
        return "has no columns but prompts and answers"
    return f"has the further columns {', '.join(shorten_list(sorted(columns)))}"


def _refuse_generators(what: str, function: object) -> None:
    for called in (function, getattr(function, "__call__", None)):  # noqa: B004 - the method of an instance
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            raise ConfigError(f"{what} yields. Return its scores from a plain function")


def _find_check(what: str, function: Callable[..., Any]) -> Callable[[str], object] | None:
    """Returns the function's `check_answer`, if it has one."""
    if not isinstance(function, SupportsAnswerCheck):
        return None
    check: object = function.check_answer
    label = f"{what}: check_answer"
    if not callable(check):
        raise ConfigError(f"{label} is {show(check)}, not a function. Write it as def f(answer)")
    _refuse_generators(label, check)
    if inspect.iscoroutinefunction(check):
        raise ConfigError(f"{label} is an async function. Make it a plain one: def f(answer)")
    try:
        inspect.signature(check, follow_wrapped=False).bind("answer")
    except TypeError as error:
        raise ConfigError(f"{label} cannot be called as f(answer): {error}. Write it as def f(answer)") from None
    except ValueError:  # written in C, and says nothing of its arguments
        pass
    return function.check_answer


def _rows_by_path(config: Config, rows: Mapping[str, Sequence[Row]]) -> dict[str, Sequence[Row]]:
    """Every file once, with most of the rows that are read of it."""
    by_path: dict[str, Sequence[Row]] = {}
    for name, part in rows.items():
        path = ", ".join(each for each, _ in config.data.sources_of(name))
        by_path[path] = max(by_path.get(path, ()), part, key=len)
    return by_path


def _check_answers(named: _Named, checked: _Checked, path: str, rows: Sequence[Row]) -> None:
    assert checked.check_answer is not None, "the caller asked"
    for number, row in enumerate(rows):
        if checked.needs_answers and row.answer is None:
            continue
        reason = None
        with Caught(also=(SystemExit,), but=(Terminated,)) as caught:
            if _is_false(checked.check_answer(row.answer or "")):
                reason = "its check_answer returned False"
        if isinstance(caught.error, ConfigError):
            raise ConfigError(f"{named.label}: {caught.error}") from caught.error
        if caught.error is not None:
            reason = _describe(caught.error)
        if reason is not None:
            where = locate_row(rows, number, source=path)
            raise DataError(
                f"{where}: the answer {show(row.answer)} cannot be read by {named.label}: {reason}. "
                f"Correct the line, or set {named.key}"
            )


def _is_false(found: object) -> bool:
    """True for Python's False and numpy's."""
    return type(found).__name__ in ("bool", "bool_") and not found


def _describe(error: BaseException) -> str:
    """Returns the message of an exception, or its class if the message is empty or cannot be shown."""
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    own, colon, message = text.partition(": ")
    return shorten(message if colon and own.endswith(("ValueError", "DataError")) else text, _MOST_REASON)
