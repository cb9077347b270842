"""The functions of one worker: bound to their conventions, called in a pool, their results joined."""

from __future__ import annotations

import math
import pickle
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hf_algorithms.rewards._conventions import Binding, Style, bind_function
from hf_algorithms.rewards._http import HTTPScorer, is_url
from hf_algorithms.rewards._load import get_users_function, load_function
from hf_algorithms.rewards._pool.client import RewardPool
from hf_algorithms.rewards._pool.messages import Calls, Outcome, RaisedCall
from hf_algorithms.rewards._pool.process import Loader, call_function, is_async
from hf_algorithms.rewards._result_numbers import WrongResult
from hf_algorithms.rewards._results import CallScores
from hf_algorithms.rewards._samples import Samples
from hf_algorithms.rewards._trainer import CallLog
from hf_algorithms.url_secrets import hide_secrets
from hf_algorithms.users_code import pickle_with_module
from hf_protocols import read_machine_limits
from hf_protocols.errors import RewardError
from hf_protocols.foreign_code import Caught
from hf_protocols.validation import show

__all__ = ["FunctionSpec", "ScoredSamples", "ScoringFunctions"]

_MOST_PROCESSES = 64


@dataclass(frozen=True, kw_only=True)
class FunctionSpec:
    """One function that scores responses.

    Attributes:
        name: of its metrics.
        function: `module:function`, `file.py:function`, a URL, or the function itself.
        weight: of its scores in the sum.
        deadline_s: of one response; a call for several has as many times that.
        style: its convention; `auto`: the one that its parameters show.
        allowed_hosts: that a URL may name in addition to this machine.
    """

    name: str
    function: str | Callable[..., Any] = field(repr=False)
    weight: float = 1.0
    deadline_s: float = 30.0
    style: Style = "auto"
    allowed_hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScoredSamples:
    """Result of one function for every response.

    Attributes:
        scores: NaN where a response cannot be scored.
        failed: True where a call exceeded its deadline or ended its process.
        metrics: further numbers by name; NaN where a response has no number.
        logged: sum and count of what TRL's `log_metric` was given, by name.
        columns: values that TRL's `log_extra` was given, by column; None for responses without one.
    """

    scores: list[float]
    failed: list[bool]
    metrics: dict[str, list[float]] = field(default_factory=dict)
    logged: dict[str, tuple[float, float]] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def valid(self) -> list[bool]:
        """True where there is a score."""
        return [not math.isnan(score) for score in self.scores]


@dataclass(frozen=True)
class _Bound:
    """A function as it is called."""

    spec: FunctionSpec
    label: str
    function: Callable[..., Any]
    binding: Binding
    is_async: bool
    is_local: bool
    has_deadline: bool

    def refuse(self, samples: Samples, rows: Sequence[int], outcome: Outcome | None) -> None:
        """Raises what the function did wrong."""
        if isinstance(outcome, RaisedCall):
            several = f", the first of {len(rows)}" if len(rows) > 1 else ""
            scored = "" if outcome.is_load else f"\n  while it scored {samples.describe(rows[0])}{several}"
            raise RewardError(f"{self.label} raised {outcome.text}{scored}")
        if isinstance(outcome, WrongResult):
            which = "" if outcome.row is None else f" for {samples.describe(rows[outcome.row])}"
            raise RewardError(f"{self.label} {outcome.problem}{which}. {outcome.advice}")

    def call_here(self, calls: Calls) -> list[Outcome | None]:
        """Makes calls in this process; ends at the first that goes wrong."""
        outcomes: list[Outcome | None] = [None] * len(calls.payloads)
        for number, num_rows in enumerate(calls.num_rows):
            call = partial(call_function, self.function, calls, number)
            found = self._call_in_thread(call, calls.deadline_s * num_rows) if self.has_deadline else call()
            outcomes[number] = found
            if isinstance(found, RaisedCall | WrongResult):
                break
        return outcomes

    def _call_in_thread(self, call: Callable[[], Outcome], deadline_s: float) -> Outcome:
        """The thread stays behind when it exceeds the deadline."""
        found: list[Outcome] = []
        thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
        thread.start()
        thread.join(deadline_s)
        if not found:
            raise RewardError(
                f"{self.label} has not returned after {deadline_s:g} s. It runs in this process, where it cannot be "
                "ended. Raise deadline_s, or define the function in a module"
            )
        return found[0]


class ScoringFunctions:
    """Functions that score responses in processes of their own.

    A function that cannot be pickled runs in this process, which is said once: its deadline then ends the run.

    Args:
        specs: the functions.
        search_path: folders where their modules are looked for first.
        num_processes: that call them; by default as many as there are cores. 0: all run in this process, for
            debuggers, without a deadline.
        kind: stands in messages before "function".

    Raises:
        ConfigError: for a function that is not found, or whose parameters are of no convention.
    """

    def __init__(
        self,
        specs: Sequence[FunctionSpec],
        *,
        search_path: Sequence[str] = (),
        num_processes: int | None = None,
        kind: str = "reward",
    ) -> None:
        self._functions: list[_Bound] = []
        loaders = []
        for spec in specs:
            function, loader = _find(spec, search_path, stays=num_processes == 0)
            label = _describe(spec, function, kind)
            binding = bind_function(label, get_users_function(function), spec.style)
            waits = is_async(get_users_function(function))
            has_deadline = num_processes != 0
            self._functions.append(_Bound(spec, label, function, binding, waits, loader is None, has_deadline))
            loaders.append(pickle.dumps(_Missing()) if loader is None else loader)
        cores = num_processes or min(read_machine_limits().num_cpus, _MOST_PROCESSES)
        is_needed = not all(each.is_local for each in self._functions)
        self._pool = RewardPool(loaders, num_processes=cores) if is_needed else None

    @property
    def specs(self) -> list[FunctionSpec]:
        """The functions, in order."""
        return [each.spec for each in self._functions]

    def score(self, samples: Samples, functions: Sequence[int] | None = None) -> list[ScoredSamples]:
        """Calls functions on a batch: per sample, or with all responses of a group.

        Args:
            samples: the batch.
            functions: numbers of those that are called; by default all.

        Raises:
            RewardError: when a function raises, with the place in its code, or returns something else than a score for
                each response; when one that runs in this process exceeds its deadline.
        """
        chosen = list(range(len(self._functions)) if functions is None else functions)
        calls = [samples.split_calls(self._functions[number].binding) for number in chosen]
        batches = [self._build_batch(number, samples, rows) for number, rows in zip(chosen, calls, strict=True)]
        outcomes = self._run(batches)
        for number, of_function, found in zip(chosen, calls, outcomes, strict=True):
            for rows, outcome in zip(of_function, found, strict=True):
                self._functions[number].refuse(samples, rows, outcome)
        return [_join(len(samples), rows, found) for rows, found in zip(calls, outcomes, strict=True)]

    def find_naming(self, parameter: str) -> set[int]:
        """Returns the numbers of the functions that have a parameter of this name."""
        return {number for number, each in enumerate(self._functions) if parameter in (each.binding.keywords or ())}

    def describe(self, number: int) -> str:
        """Names a function in a message."""
        return self._functions[number].label

    def close(self) -> None:
        """Ends the processes."""
        if self._pool is not None:
            self._pool.close()

    def _build_batch(self, number: int, samples: Samples, calls: Sequence[Sequence[int]]) -> Calls:
        bound = self._functions[number]
        try:
            arguments = samples.build_arguments(bound.binding, calls)
            payloads = [pickle.dumps(each, pickle.HIGHEST_PROTOCOL) for each in arguments]
        except KeyError as error:
            raise RewardError(
                f"{bound.label} has the parameter {show(error.args[0])}, which is neither offered nor a column of the "
                "data. Rename it, or add the column"
            ) from None
        return Calls(
            function=number,
            per_sample=bound.binding.convention.per_sample,
            is_async=bound.is_async,
            deadline_s=bound.spec.deadline_s,
            num_rows=[len(rows) for rows in calls],
            payloads=payloads,
        )

    def _run(self, batches: Sequence[Calls]) -> list[list[Outcome | None]]:
        found: list[list[Outcome | None]] = [[None] * len(calls.payloads) for calls in batches]
        pooled = [index for index, calls in enumerate(batches) if not self._functions[calls.function].is_local]
        if self._pool is not None and pooled:
            for index, outcomes in zip(pooled, self._pool.run([batches[index] for index in pooled]), strict=True):
                found[index] = outcomes
        for index, calls in enumerate(batches):
            if self._functions[calls.function].is_local:
                found[index] = self._functions[calls.function].call_here(calls)
        return found


class _Missing:
    """Stands for a function that is not in the pool."""

    def load(self) -> None:
        """Nothing."""


def _find(spec: FunctionSpec, search_path: Sequence[str], *, stays: bool) -> tuple[Callable[..., Any], bytes | None]:
    """The function, and what a process of the pool loads; None if it cannot go there, or `stays`."""
    if not isinstance(spec.function, str):
        return spec.function, None if stays else _pickle(spec)
    if is_url(spec.function):
        scorer = HTTPScorer(
            spec.function, deadline_s=spec.deadline_s, style=spec.style, allowed_hosts=spec.allowed_hosts
        )
        return scorer, None if stays else pickle.dumps(Loader(function=scorer))
    function = load_function(spec.function, search_path=search_path)
    loader = Loader(name=spec.function, search_path=tuple(map(str, search_path)))
    return function, None if stays else pickle.dumps(loader)


def _pickle(spec: FunctionSpec) -> bytes | None:
    with Caught() as caught:  # pickling calls a user's code
        return pickle_with_module(Loader(function=spec.function), spec.function)  # type: ignore[arg-type]
    warnings.warn(
        f"the function {show(spec.name)} runs in this process, because it cannot be pickled "
        f"({type(caught.error).__name__}: {caught.error}). It cannot be ended at its deadline: the run ends instead",
        stacklevel=4,
    )
    return None


def _describe(spec: FunctionSpec, function: Any, kind: str) -> str:
    if isinstance(spec.function, str):
        is_server = is_url(spec.function)
        return f"the {kind} {'server' if is_server else 'function'} {hide_secrets(spec.function)}"
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return f"the {kind} function {module}:{name}" if module and name else f"the {kind} function {show(function)}"


def _join(num_rows: int, calls: Sequence[Sequence[int]], outcomes: Sequence[Outcome | None]) -> ScoredSamples:
    found = ScoredSamples([math.nan] * num_rows, [False] * num_rows)
    for rows, outcome in zip(calls, outcomes, strict=True):
        if isinstance(outcome, CallScores):
            for row, score in zip(rows, outcome.scores, strict=True):
                found.scores[row] = score
            for name, values in outcome.metrics.items():
                column = found.metrics.setdefault(name, [math.nan] * num_rows)
                for row, value in zip(rows, values, strict=True):
                    column[row] = value
            if outcome.log is not None:
                _join_log(found, rows, outcome.log)
        else:
            for row in rows:
                found.failed[row] = True
    return found


def _join_log(found: ScoredSamples, rows: Sequence[int], log: CallLog) -> None:
    for name, (total, count) in log.numbers.items():
        before, known = found.logged.get(name, (0.0, 0.0))
        found.logged[name] = (before + total, known + count)
    for name, values in log.columns.items():
        column = found.columns.setdefault(name, [None] * len(found.scores))
        for row, value in zip(rows, values, strict=True):
            column[row] = value
