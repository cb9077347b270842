"""Following a run: its configuration, metrics and summary go to the trackers and to a user's hook."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hf_algorithms.trackers._channel import Channel
from hf_algorithms.trackers._names import load_tracker
from hf_algorithms.trackers._tracker import (
    RunFacts,
    Status,
    Tracker,
    hide_config_secrets,
    select_numbers,
    select_summary,
)
from hf_algorithms.users_code import describe_raised
from hf_protocols.errors import ConfigError
from hf_protocols.foreign_code import Caught
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_algorithms.run_directory import RunDirectory

__all__ = ["MetricsHook", "Tracking", "prepare_tracking"]

MetricsHook = Callable[[int, dict[str, float]], object]
"""Called with an iteration and its metrics, in the program that runs; what it returns is not used."""
_WAITING = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
_CLOSE_S = 30.0
"""For all trackers together, at the end of a run."""


def prepare_tracking(
    names: Sequence[str], on_metrics: MetricsHook | str | None = None, *, search_path: Sequence[str] = ()
) -> Tracking:
    """Imports the libraries of trackers, and a hook.

    Args:
        names: of the trackers, as `run.trackers` has them.
        on_metrics: a hook, or its place as `run.on_metrics` has it; None: there is none.
        search_path: folders where the hook's module is looked for first.

    Raises:
        ConfigError: for a library that is not installed, and a hook that is not found or takes other arguments.
    """
    hook = _load_hook(on_metrics, search_path) if isinstance(on_metrics, str) else on_metrics
    if hook is not None:
        _check_hook(hook, on_metrics if isinstance(on_metrics, str) else getattr(hook, "__name__", repr(hook)))
    return Tracking({name: load_tracker(name) for name in names}, hook)


class Tracking:
    """Trackers and a hook that are ready for a run, see `prepare_tracking`."""

    def __init__(self, trackers: Mapping[str, Tracker], hook: MetricsHook | None) -> None:
        self._trackers = trackers
        self._hook = hook

    @contextmanager
    def follow(
        self, directory: RunDirectory, note: Callable[[str], None], *, sections: Mapping[str, Any]
    ) -> Iterator[None]:
        """Within it, what the run writes into its directory goes to the trackers; then they are closed.

        Args:
            directory: of the run, which has begun.
            note: shows the user a line.
            sections: of the run's configuration, as TOML has them.
        """
        if not self._trackers and self._hook is None:
            yield
            return
        facts = RunFacts(
            name=directory.path.name,
            directory=directory.path,
            algorithm=sections["algorithm"]["name"],
            config=hide_config_secrets(sections),
        )
        channels = [Channel(name, tracker, facts, note) for name, tracker in self._trackers.items()]
        listener = _Listener(channels, self._hook, note)
        directory.listen(listener)
        status: Status = "failed"
        try:
            yield
            status = "finished"
        except (KeyboardInterrupt, SystemExit):
            status = "interrupted"
            raise
        finally:
            listener.close(status, directory)


class _Listener:
    """Hears what a run writes."""

    def __init__(self, channels: Sequence[Channel], hook: MetricsHook | None, note: Callable[[str], None]) -> None:
        self._channels = channels
        self._hook = hook
        self._note = note
        self._iteration = 0
        self._summary: dict[str, Any] | None = None
        self._num_skipped = 0
        self._hook_failure: str | None = None

    def hear_metrics(self, row: Mapping[str, float | int]) -> None:
        """Passes the metrics of an iteration on; raises nothing except for Ctrl-C and signals."""
        self._iteration = int(row["iteration"])
        numbers = select_numbers(row)
        for channel in self._channels:
            channel.log(self._iteration, numbers)
        if self._hook is None:
            return
        if self._hook_failure is not None:
            self._num_skipped += 1
            return
        with Caught() as caught:
            self._hook(self._iteration, dict(numbers))
        if caught.error is not None:
            self._num_skipped += 1
            self._hook_failure = describe_raised(caught.error)
            self._note(f"warning: run.on_metrics raised {self._hook_failure}\nThe run goes on without it")

    def hear_summary(self, body: dict[str, Any]) -> None:
        """Keeps the summary until the end."""
        self._summary = body

    def close(self, status: Status, directory: RunDirectory) -> None:
        """Ends all trackers within a deadline, and says what they did not get.

        A run that stopped between two iterations ended without an error; its summary says so.
        """
        summary = select_summary(self._summary or {})
        if (self._summary or {}).get("status") == "interrupted":
            status = "interrupted"
        for channel in self._channels:
            channel.finish(status, summary, self._iteration)
        end_s = time.monotonic() + _CLOSE_S
        lost: dict[str, dict[str, Any]] = {}
        for channel in self._channels:
            if not channel.join(max(0.0, end_s - time.monotonic())) and channel.failure is None:
                channel.failure = f"it did not end within {_CLOSE_S:g} s"
                self._note(f"warning: the tracker {channel.name} failed: {channel.failure}")
            if channel.failure is not None:
                missing = channel.num_given - channel.num_written
                lost[channel.name] = {"error": channel.failure, "iterations_lost": missing}
        if self._hook_failure is not None:
            lost["on_metrics"] = {"error": self._hook_failure.partition("\n")[0], "iterations_lost": self._num_skipped}
        for name, found in lost.items():
            self._note(f"{name}: {found['iterations_lost']} of {self._iteration} iterations are missing there")
        if lost and self._summary is not None:
            self._summary["trackers"] = lost
            directory.write_json("summary.json", self._summary)


def _load_hook(name: str, search_path: Sequence[str]) -> MetricsHook:
    from hf_algorithms.rewards import load_function

    try:
        return load_function(name, search_path=search_path)
    except ConfigError as error:
        raise ConfigError(f"run.on_metrics: {error}") from error


def _check_hook(hook: MetricsHook, name: str) -> None:
    from hf_algorithms.rewards import get_users_function

    function = get_users_function(hook)
    method = getattr(function, "__call__", None)  # noqa: B004 - of an object that is called
    if any(is_kind(each) for is_kind in _WAITING for each in (function, method)):
        raise ConfigError(
            f"run.on_metrics = {show(name)}: an async function or a generator does nothing when it is called. "
            "Make it a plain function"
        )
    try:
        inspect.signature(function).bind(1, {})
    except TypeError as error:
        raise ConfigError(
            f"run.on_metrics = {show(name)}: it cannot be called with an iteration and its metrics: {error}. "
            "Let it take these two"
        ) from None
    except ValueError:  # a built-in function without a signature
        pass
