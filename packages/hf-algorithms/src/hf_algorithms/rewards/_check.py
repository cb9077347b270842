"""Checks of reward functions before a run starts: their signatures, and the answers that they can read."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from hf_algorithms.data import locate_row
from hf_algorithms.rewards._load import get_users_function, imports_from, load_function
from hf_controller import Terminated
from hf_protocols.arguments import shorten, show
from hf_protocols.errors import ConfigError, DataError, HybridFlowError

if TYPE_CHECKING:
    from hf_algorithms.config import Config
    from hf_algorithms.data import Row

__all__ = ["SupportsAnswerCheck", "answers_checked_by", "check_rewards"]

_MOST_REASON = 300

Function = TypeVar("Function", bound=Callable[..., Any])


@runtime_checkable
class SupportsAnswerCheck(Protocol):
    """A reward function that says beforehand which answers of the data it can read."""

    def check_answer(self, answer: str) -> object:
        """Raises an exception, such as a ValueError with the reason, or returns False for an answer it cannot read."""
        ...


def answers_checked_by(check: Callable[[str], object]) -> Callable[[Function], Function]:
    """Decorator of a reward function: ``check`` becomes its ``check_answer``, see `SupportsAnswerCheck`."""

    def decorate(function: Function) -> Function:
        function.check_answer = check  # type: ignore[attr-defined]
        return function

    return decorate


def check_rewards(config: Config, rows: Mapping[str, Sequence[Row]], *, search_path: Sequence[str] = ()) -> None:
    """Load `reward.function`, `reward.metric` and `cost.function`, and let them look at the answers of all rows.

    Args:
        config: names the functions and the files.
        rows: those that a run reads, by data set: ``train``, ``validation`` and ``test``; row i is line i + 1.
        search_path: folders where the functions' modules are looked for first.

    Raises:
        ConfigError: naming the key, for a function that is not found or cannot be called with three lists.
        DataError: naming file and line, for an answer that a function cannot read.
    """
    reward = config.reward
    names = {} if reward.evaluates_model else {reward.metric: "reward.metric"}
    if reward.uses_function:
        names[reward.function] = "reward.function"
    if config.cost.function is not None:
        names = {config.cost.function: "cost.function", **names}
    for name, key in reversed(names.items()):
        try:
            function = get_users_function(load_function(name, search_path=search_path))
        except ConfigError as error:
            raise ConfigError(f"{key} = {error}") from error
        what = f"{key} = {show(name)}"
        try:
            check_answer = _check_function(what, function)
        except HybridFlowError:
            raise
        except Exception as error:  # an attribute of a user's object may raise anything
            raise ConfigError(f"{what} cannot be inspected: {_describe(error)}. Write it as a function") from error
        if check_answer is not None:
            with imports_from(search_path):
                for path, longest in _rows_by_path(config, rows).items():
                    _check_answers(what, check_answer, path, longest)


def _check_function(what: str, function: Callable[..., Any]) -> Callable[[str], object] | None:
    """Returns the function's `check_answer`, if it has one."""
    if isinstance(function, type):
        raise ConfigError(f"{what} is a class. Name a function, or an instance with a method __call__")
    _check_call(what, function, ("prompts", "responses", "answers"))
    if not isinstance(function, SupportsAnswerCheck):
        return None
    _check_call(f"{what}: check_answer", function.check_answer, ("answer",))
    return function.check_answer


def _check_call(what: str, function: object, arguments: tuple[str, ...]) -> None:
    """By its signature only: nobody's code runs."""
    wanted = f"({', '.join(arguments)})"
    if not callable(function):
        raise ConfigError(f"{what} is {show(function)}, not a function. Write it as def f{wanted}")
    for called in (function, getattr(function, "__call__", None)):  # noqa: B004 - the method of an instance
        if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
            raise ConfigError(f"{what} is an async function. Make it a plain one: def f{wanted}")
        if inspect.isgeneratorfunction(called):
            raise ConfigError(f"{what} yields. Return a list from a plain function: def f{wanted}")
    if (problem := _misfit(function, arguments)) is not None:
        raise ConfigError(f"{what} cannot be called as f{wanted}: {problem}. Write it as def f{wanted}")


def _misfit(function: Any, arguments: tuple[str, ...]) -> str | None:
    try:
        # A decorator may adapt another signature to this one, so that the outermost function is the one that counts.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # written in C, and says nothing of its arguments
        return None
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return f"its arguments are {signature}, {error}"
    named = [name for name in signature.parameters if name in arguments]
    if set(named) == set(arguments) and named != list(arguments):
        return f"its arguments are {signature}, in another order than they are given"
    passes_on = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in signature.parameters.values())
    wrapped = getattr(function, "__wrapped__", None)
    return _misfit(wrapped, arguments) if passes_on and wrapped is not None else None


def _rows_by_path(config: Config, rows: Mapping[str, Sequence[Row]]) -> dict[str, Sequence[Row]]:
    """Every file once, with most of the rows that are read of it."""
    by_path: dict[str, Sequence[Row]] = {}
    for name, part in rows.items():
        path = ", ".join(each for each, _ in config.data.sources_of(name))
        by_path[path] = max(by_path.get(path, ()), part, key=len)
    return by_path


def _check_answers(what: str, check: Callable[[str], object], path: str, rows: Sequence[Row]) -> None:
    for number, row in enumerate(rows):
        reason = None
        try:
            if _is_false(check(row.answer or "")):
                reason = "its check_answer returned False"
        except Terminated:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function may raise anything, which is reported
            reason = _describe(error)
        if reason is not None:
            where = locate_row(rows, number, source=path)
            raise DataError(
                f"{where}: the answer {show(row.answer)} cannot be read by {what}: {reason}. "
                f"Correct the line, or set {what.partition(' ')[0]}"
            )


def _is_false(found: object) -> bool:
    """True for Python's False and numpy's."""
    return type(found).__name__ in ("bool", "bool_") and not found


def _describe(error: BaseException) -> str:
    """Returns the message of an exception, or its class if it has none or cannot show it."""
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    own, colon, message = text.partition(": ")
    return shorten(message if colon and own.endswith(("ValueError", "DataError")) else text, _MOST_REASON)
