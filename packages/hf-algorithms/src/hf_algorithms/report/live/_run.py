"""A run that is looked at again and again: each file is read when it changed, and what was read stays."""

from __future__ import annotations

import math
import threading
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, TypeVar

from hf_algorithms.report._decimation import Decimated, decimate
from hf_algorithms.report._files import describe_end, parse_settings
from hf_algorithms.report._health import HealthNumber, measure_health
from hf_algorithms.report._json_values import parse_json
from hf_algorithms.report._metrics_file import MetricsFile
from hf_algorithms.report._sample_files import SampleFiles
from hf_algorithms.report._timeline import Timeline, read_timeline
from hf_protocols.drawing import format_bytes, format_duration
from hf_protocols.errors import ConfigError

__all__ = ["AXES", "LiveRun", "open_runs"]

T = TypeVar("T")

AXES = {"iteration": "iteration", "tokens": "tokens", "seconds": "seconds"}
"""Horizontal axes that curves may have, with their names in a chart."""
_STEP_BYTES = 1 << 18
"""Of `metrics.jsonl`, parsed while a request waits; the rest is read behind it."""
_LARGEST_TRACE = 64 << 20
_MOST_POINTS = 400
_MARKS = (".hybridflow-run", "config.toml", "metrics.jsonl", "summary.json")


class _File(Generic[T]):
    """Contents of a file, parsed again when it has changed. One that is deleted or damaged keeps its last ones."""

    def __init__(self, path: Path, parse: Callable[[str], T], empty: T, largest: int = 16 << 20) -> None:
        self.path = path
        self._parse = parse
        self._largest = largest
        self._seen: tuple[int, int, int] | None = None
        self.value = empty
        self.note = ""

    @property
    def version(self) -> str:
        return f"{self._seen}"

    def look(self) -> bool:
        """Notices a change without reading; returns False if the file is absent."""
        try:
            stat = self.path.stat()
        except OSError:
            return False
        seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if seen != self._seen:
            self._seen, self._is_read = seen, False
        return True

    _is_read = True

    def read(self) -> T:
        """Returns the contents as of the last `look`."""
        if self._is_read or self._seen is None:
            return self.value
        self._is_read = True
        name, size = self.path.name, self._seen[2]
        if size > self._largest:
            limit = format_bytes(self._largest)
            self.note = f"{name} has {format_bytes(size)}, more than the {limit} that are read here"
            return self.value
        try:
            self.value = self._parse(self.path.read_text(encoding="utf-8"))
            self.note = ""
        except OSError as error:
            self.note = f"{name} cannot be read: {error.strerror}"
        except (ValueError, RecursionError):
            self.note = f"{name} is {'empty' if not size else 'damaged: it is not what a run writes'}"
        return self.value


class LiveRun:
    """One run's files. Every method may be called from any thread.

    Args:
        directory: of the run.
        name: that distinguishes it from the other runs.
        index: its place among them, which is also its colour.
    """

    def __init__(self, directory: Path, name: str, index: int) -> None:
        self.directory = directory
        self.name = name
        self.index = index
        self.colour = index % 8
        self.lock = threading.RLock()
        self.samples = SampleFiles(directory)
        self._metrics = MetricsFile(directory / "metrics.jsonl")
        self._config = _File(directory / "config.toml", _check_settings, "")
        self._summary = _File[Mapping[str, Any]](directory / "summary.json", _parse_object, {})
        self._trace = _File[Mapping[int, Timeline]](directory / "trace.json", _parse_trace, {}, _LARGEST_TRACE)
        self._reader: threading.Thread | None = None
        self._was_seen = False
        self._health: tuple[str, list[HealthNumber]] = ("", [])
        self._points: dict[tuple[str, str], tuple[str, Decimated]] = {}
        self._progress: dict[str, tuple[str, Sequence[float]]] = {}

    def refresh(self) -> None:
        """Looks at all files, and reads what a request can wait for; the rest of a long one is read behind it."""
        with self.lock:
            if self._reader is None and self._metrics.refresh(_STEP_BYTES):
                self._reader = threading.Thread(target=self._read_on, name=f"reads {self.name}", daemon=True)
                self._reader.start()
            found = [each.look() for each in (self._config, self._summary, self._trace)]
            self.samples.iterations()
            self._was_seen = self._was_seen or self._metrics.exists or any(found)

    def _read_on(self) -> None:
        while True:
            with self.lock:
                if not self._metrics.refresh(_STEP_BYTES):
                    self._reader = None
                    return
            time.sleep(0.001)  # a request may want the lock

    def finish_reading(self) -> None:
        """Waits until all of `metrics.jsonl` is read."""
        reader = self._reader
        if reader is not None:
            reader.join()

    @property
    def version(self) -> str:
        """Changes when there is something else to show."""
        parts = [each.version for each in (self._config, self._summary, self._trace)]
        return "|".join([self._metrics.version, *parts, self.samples.version, str(self.directory.is_dir())])

    @property
    def config_text(self) -> str:
        """`config.toml` as it is."""
        return self._config.read()

    @property
    def summary(self) -> Mapping[str, Any]:
        """`summary.json`; empty before the run wrote it."""
        return self._summary.read()

    @property
    def algorithm(self) -> str:
        """Name of the algorithm, or an empty string."""
        section = parse_settings(self.config_text).get("algorithm", {})
        return str(section.get("name", "")) if isinstance(section, dict) else ""

    @property
    def iteration(self) -> int:
        """The last one, 0 before the first."""
        return int(self._metrics.last.get("iteration", 0))

    @property
    def last(self) -> Mapping[str, float]:
        """The newest row of `metrics.jsonl`."""
        return self._metrics.last

    def timelines(self) -> Mapping[int, Timeline]:
        """Returns the calls of every iteration that the trace has; empty before the run wrote it."""
        return self._trace.read()

    def columns(self) -> Mapping[str, Sequence[float]]:
        """Returns the values of every metric."""
        return self._metrics.columns()[1]

    def health(self) -> Sequence[HealthNumber]:
        """Returns the numbers that are watched."""
        version = self._metrics.version
        if self._health[0] != version:
            self._health = (version, measure_health(self.columns()))
        return self._health[1]

    def phases(self) -> tuple[float, Sequence[tuple[str, float]]]:
        """Returns the seconds of the newest iteration and those of its phases, the longest first, if it has a time."""
        total = self.last.get("time/iteration_s", 0.0)
        found = {
            name.removeprefix("time/").removesuffix("_s"): value
            for name, value in self.last.items()
            if name.startswith("time/") and name != "time/iteration_s"
        }
        return total, sorted(found.items(), key=lambda item: -item[1]) if total > 0 else ()

    def points(self, metric: str, axis: str) -> Decimated:
        """Returns a bounded number of points of a metric over `iteration`, `tokens` or `seconds`."""
        version = self._metrics.version
        known = self._points.get((metric, axis))
        if known is None or known[0] != version:
            columns = self.columns()
            found = (
                decimate(self._measure(axis), columns[metric], _MOST_POINTS) if metric in columns else Decimated([], [])
            )
            known = self._points[metric, axis] = (version, found)
        return known[1]

    def _measure(self, axis: str) -> Sequence[float]:
        """The horizontal values, which all metrics share."""
        version = self._metrics.version
        known = self._progress.get(axis)
        if known is None or known[0] != version:
            known = self._progress[axis] = (version, _measure_progress(*self._metrics.columns(), axis))
        return known[1]

    def describe_state(self) -> tuple[str, str]:
        """Returns one word for where the run stands, and a few more."""
        summary = self.summary
        if not self.directory.is_dir():
            return "gone", "the directory was deleted or moved; shown is what was read before"
        if isinstance(status := summary.get("status"), str) and status != "running":
            return status, describe_end(summary)
        if summary and "status" not in summary:
            return "finished", ""
        try:
            age_s = max(0.0, time.time() - self._metrics.path.stat().st_mtime)
        except OSError:
            return "waiting", "no metrics.jsonl yet"
        if not self.iteration:
            return "waiting", "metrics.jsonl is empty: the first iteration is not over, or the run was killed before"
        return "running", f"or killed: the last line is {format_duration(age_s)} old"

    def notes(self) -> list[str]:
        """Returns one sentence for everything that could not be read or is not read yet."""
        notes = [*self._metrics.notes, self._config.note, self._summary.note]
        if self._was_seen and not self._metrics.exists and self.directory.is_dir():
            notes.append("metrics.jsonl is absent; curves show what was read of it before")
        if (share := self._metrics.share_read) < 1 and self._reader is not None:
            notes.append(f"metrics.jsonl is long: {share:.0%} is read; until then curves show a sample of its lines")
        return [note for note in notes if note]

    @property
    def trace_note(self) -> str:
        """Returns the reason for which no timeline is drawn; an empty string if one is."""
        if self._trace.note:
            return self._trace.note
        return "" if self.timelines() else "trace.json is absent or has no call: a run writes it when it ends."


def open_runs(directories: Sequence[Path]) -> list[LiveRun]:
    """Returns the runs in these directories, with names that differ.

    Raises:
        ConfigError: for a directory that holds no run, or is named twice.
    """
    found: dict[Path, Path] = {}
    for directory in directories:
        resolved = directory.resolve()
        if resolved in found:
            raise ConfigError(f"RUN={str(directory)!r}: it is named twice. Name each run once")
        if not resolved.is_dir() or not any((resolved / name).exists() for name in _MARKS):
            what = "is not a directory" if not resolved.is_dir() else f"holds none of {', '.join(_MARKS[1:])}"
            raise ConfigError(f"RUN={str(directory)!r}: it {what}. Name the run.output_dir of a run")
        found[resolved] = directory
    names = [path.name for path in found]
    return [
        LiveRun(path, path.name if names.count(path.name) == 1 else str(given), index)
        for index, (path, given) in enumerate(found.items())
    ]


def _measure_progress(
    iterations: Sequence[float], columns: Mapping[str, Sequence[float]], axis: str
) -> Sequence[float]:
    """The horizontal values: iterations, or the sum of tokens or seconds up to each of them."""
    if axis == "iteration":
        return iterations
    seconds = columns.get("time/iteration_s", ())
    parts = seconds
    if axis == "tokens":
        rates = columns.get("perf/tokens_per_s", ())
        parts = [rate * spent for rate, spent in zip(rates, seconds, strict=False)]
    if not len(parts):
        return [math.nan] * len(iterations)
    # a sample of the lines stands for the lines between them
    steps = [after - before for before, after in zip([0.0, *iterations], iterations, strict=False)]
    known = (part if math.isfinite(part) else 0.0 for part in parts)
    return list(accumulate(part * max(step, 0.0) for part, step in zip(known, steps, strict=True)))


def _check_settings(text: str) -> str:
    tomllib.loads(text)
    return text


def _parse_object(text: str) -> Mapping[str, Any]:
    body = parse_json(text)
    if not isinstance(body, dict):
        raise ValueError("not an object")
    return body


def _parse_trace(text: str) -> Mapping[int, Timeline]:
    events = _parse_object(text).get("traceEvents")
    if not isinstance(events, list):
        raise ValueError("no list of events")
    return read_timeline([event for event in events if isinstance(event, dict)])
