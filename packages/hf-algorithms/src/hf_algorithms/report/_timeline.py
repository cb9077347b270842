"""Calls of a Chrome trace, by iteration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_algorithms.report._json_values import read_number

__all__ = ["Timeline", "TimelineCall", "TimelinePart", "TimelineRow", "choose_iteration", "read_calls", "read_timeline"]

RowKey = tuple[str, str]


@dataclass(frozen=True)
class TimelinePart:
    """A named stretch of time inside a call; microseconds."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True, kw_only=True)
class TimelineCall:
    """One call of a worker's method on one rank; microseconds.

    Attributes:
        row: process and thread of the trace.
        key: what the same call has in common on all ranks.
        iteration: that the call belonged to; None outside of any.
        arguments: what else the trace says of it.
        bytes_read: of the rows that it was given; None if the trace does not say.
    """

    row: RowKey
    name: str
    key: str
    iteration: int | None
    arguments: Mapping[str, Any]
    start_us: float
    end_us: float
    bytes_read: float | None
    failed: bool
    parts: tuple[TimelinePart, ...]

    @property
    def role(self) -> str:
        """Part of the name before the dot: `actor` in `actor.update_actor`."""
        return self.name.partition(".")[0]

    @property
    def method(self) -> str:
        """Part of the name after the dot, or the whole name."""
        return self.name.partition(".")[2] or self.name


@dataclass(frozen=True)
class TimelineRow:
    """One rank."""

    key: RowKey
    label: str


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One iteration: its calls in order of start, and every rank that worked in it."""

    iteration: int
    rows: Sequence[TimelineRow]
    calls: Sequence[TimelineCall]

    @property
    def start_us(self) -> float:
        """The first call's start."""
        return min(call.start_us for call in self.calls)

    @property
    def end_us(self) -> float:
        """The last call's end."""
        return max(call.end_us for call in self.calls)


@dataclass
class _Open:
    event: Mapping[str, Any]
    parts: list[TimelinePart] = field(default_factory=list)


def read_timeline(events: Sequence[Mapping[str, Any]]) -> dict[int, Timeline]:
    """Returns every iteration that the trace names: calls carry `args.iteration`; spans inside a call are its parts."""
    labels = _read_labels(events)
    by_iteration: dict[int, list[TimelineCall]] = {}
    for call in read_calls(events):
        if call.iteration is not None:
            by_iteration.setdefault(call.iteration, []).append(call)
    timelines = {}
    for iteration, calls in sorted(by_iteration.items()):
        keys = sorted({call.row for call in calls}, key=_natural)
        rows = [TimelineRow(key, labels.get(key) or f"process {key[0]}, thread {key[1]}") for key in keys]
        calls.sort(key=lambda call: (call.start_us, _natural(call.row)))
        timelines[iteration] = Timeline(iteration=iteration, rows=rows, calls=calls)
    return timelines


def choose_iteration(timelines: Mapping[int, Timeline]) -> Timeline | None:
    """The iteration of median length; the first one, which warms everything up, only if there are few."""
    candidates = list(timelines.values())[1 if len(timelines) > 2 else 0 :]
    candidates.sort(key=lambda timeline: timeline.end_us - timeline.start_us)
    return candidates[len(candidates) // 2] if candidates else None


def read_calls(events: Iterable[Mapping[str, Any]]) -> list[TimelineCall]:
    """Every span that lies in no other span of its row; spans inside it are its parts."""
    by_row: dict[RowKey, list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("ph") == "X" and all(read_number(event.get(name)) is not None for name in ("ts", "dur")):
            by_row.setdefault(_row_key(event), []).append(event)
    calls: list[TimelineCall] = []
    for row, spans in by_row.items():
        calls += [_to_call(row, opened) for opened in _nest(spans)]
    return calls


def _nest(spans: list[Mapping[str, Any]]) -> list[_Open]:
    """Spans of one row that lie in no other, each with those that lie in it."""
    opened: list[_Open] = []
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        outer = opened[-1] if opened else None
        # A microsecond of slack: the ends are rounded floats of seconds since the epoch.
        if outer is not None and span["ts"] < _end(outer.event) and _end(span) <= _end(outer.event) + 1.0:
            outer.parts.append(TimelinePart(str(span.get("name", "")), span["ts"], _end(span)))
        else:
            opened.append(_Open(span))
    return opened


def _to_call(row: RowKey, opened: _Open) -> TimelineCall:
    arguments = _arguments(opened.event)
    iteration = arguments.get("iteration")
    name = str(opened.event.get("name", ""))
    return TimelineCall(
        row=row,
        name=name,
        key=str(arguments.get("call", name)),
        iteration=iteration if isinstance(iteration, int) else None,
        arguments=arguments,
        start_us=opened.event["ts"],
        end_us=_end(opened.event),
        bytes_read=read_number(arguments.get("bytes_read")),
        failed=bool(arguments.get("failed")),
        parts=tuple(opened.parts),
    )


def _read_labels(events: Iterable[Mapping[str, Any]]) -> dict[RowKey, str]:
    """Names of rows from the trace's metadata: process, then thread."""
    processes: dict[str, str] = {}
    threads: dict[RowKey, str] = {}
    for event in events:
        name = _arguments(event).get("name")
        if event.get("ph") == "M" and isinstance(name, str):
            if event.get("name") == "process_name":
                processes[str(event.get("pid"))] = name
            elif event.get("name") == "thread_name":
                threads[_row_key(event)] = name
    return {key: " ".join(filter(None, (processes.get(key[0]), name))) for key, name in threads.items()}


def _row_key(event: Mapping[str, Any]) -> RowKey:
    return str(event.get("pid")), str(event.get("tid"))


def _natural(key: RowKey) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdigit() else (0, part) for part in key)


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}


def _end(event: Mapping[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])
