"""Timeline of calls: one span per call and rank, and its Chrome trace."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from hf_controller.failures import Failure
from hf_protocols import CallKind, ConfigError
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_controller.groups.call import Call

__all__ = ["CallReport", "ChromeTraceFile", "Span", "SubSpan", "Trace", "refuse"]


@dataclass(frozen=True)
class SubSpan:
    """A named part of a call, from `WorkerContext.span`; wall-clock seconds."""

    name: str
    start_s: float
    end_s: float
    kind: str | None = None


class Span(NamedTuple):
    """One call on one rank. Times are wall-clock seconds since the epoch.

    Attributes:
        submit_s: the controller made the call.
        ready_s: the rank had its turn and its inputs existed.
        fetched_s: the rows were there.
        computed_s: the method returned.
        end_s: the results were stored.
        bytes_read: bytes of the rows that the method was given.
        bytes_written: bytes of the columns that it returned.
        labels: what the call belonged to, such as `{"iteration": 12}`; see `Trace.label`.
        remote_bytes: bytes of columns that came from other machines for it.
        sub_spans: named parts inside the method.
        failed: whether the call ended in an error.
        kind: the kind that the method is registered with.
    """

    call_id: int
    pool: str
    host: str
    role: str
    method: str
    rank: int
    submit_s: float
    ready_s: float
    fetched_s: float
    computed_s: float
    end_s: float
    bytes_read: int
    bytes_written: int
    labels: Mapping[str, Any]
    remote_bytes: int = 0
    sub_spans: tuple[SubSpan, ...] = ()
    failed: bool = False
    kind: CallKind = "function"

    @property
    def queue_s(self) -> float:
        """Seconds from the call to its turn: earlier calls, unready inputs. 0 if machines' clocks disagree by more."""
        return max(0.0, self.ready_s - self.submit_s)

    @property
    def fetch_s(self) -> float:
        """Seconds to fetch and assemble the rows."""
        return max(0.0, self.fetched_s - self.ready_s)

    @property
    def compute_s(self) -> float:
        """Seconds inside the method."""
        return max(0.0, self.computed_s - self.fetched_s)

    @property
    def store_s(self) -> float:
        """Seconds to store the results."""
        return max(0.0, self.end_s - self.computed_s)


class CallReport(NamedTuple):
    """Report of a rank to the controller about a call: small, without a tensor.

    Attributes:
        span: when it ran.
        num_rows: rows of the returned batch; 0 if it returned none, or was not asked for it.
        failure: why it failed, or None. `upstream` says that an input's call failed and this one never ran.
    """

    span: Span
    num_rows: int = 0
    failure: Failure | None = None
    upstream: bool = False


def refuse(call: Call, failure: Failure, *, pool: str, host: str, rank: int) -> CallReport:
    """The report of a call that could not run."""
    now_s = time.time()
    span = Span(
        call_id=call.call_id,
        pool=pool,
        host=host,
        role=call.role,
        method=call.method,
        rank=rank,
        submit_s=call.submit_s,
        ready_s=now_s,
        fetched_s=now_s,
        computed_s=now_s,
        end_s=now_s,
        bytes_read=0,
        bytes_written=0,
        failed=True,
        labels=call.labels,
        kind=call.kind,
    )
    return CallReport(span=span, failure=failure, upstream=True)


class Trace:
    """The spans of an executor's calls.

    Args:
        take_spans: takes those that ended since it was last called, without waiting; None: there never are any.
    """

    def __init__(self, take_spans: Callable[[], list[Span]] | None = None) -> None:
        self._take_spans = take_spans
        self._spans: list[Span] = []
        self._stream: ChromeTraceFile | None = None
        self.labels: dict[str, Any] = {}

    @contextmanager
    def label(self, **labels: Any) -> Iterator[None]:
        """Calls made inside the block carry `labels` in the trace.

        Raises:
            ConfigError: for labels that cannot be written into it as JSON.
        """
        try:
            kept = json.loads(json.dumps(labels, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"labels={show(labels)}. Use texts and finite numbers ({error})") from error
        before, self.labels = self.labels, {**self.labels, **kept}
        try:
            yield
        finally:
            self.labels = before

    def drain(self) -> list[Span]:
        """The spans that ended since the last call of drain. A long run drains once per iteration."""
        spans = self._take_spans() if self._take_spans is not None else []
        if self._stream is None:
            self._spans += spans
        else:
            self._stream.write(spans)
        return spans

    def write_chrome(self, path: str | os.PathLike[str]) -> None:
        """Writes every span so far as a Chrome trace (chrome://tracing, Perfetto): one row per host and rank.

        The file is whole or absent. Spans that `stream_chrome` wrote are only in the file of `stream_chrome`.

        Raises:
            OSError: when it cannot be written.
        """
        self.drain()
        file = ChromeTraceFile(path)
        file.write(self._spans)
        file.finish()

    def stream_chrome(self, path: str | os.PathLike[str], facts: Mapping[str, Any] | None = None) -> None:
        """Writes spans to the disk whenever they are drained, and keeps none; `finish_chrome` names the file.

        `facts`, an object of JSON about what is traced, stand in the file as `otherData`.
        """
        self._stream = ChromeTraceFile(path, facts)

    def finish_chrome(self) -> None:
        """Completes the file of `stream_chrome` with the spans so far.

        Raises:
            OSError: when it could not be written, now or before.
        """
        self.drain()
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.finish()


class ChromeTraceFile:
    """Writes spans into a hidden file next to `path`, which `finish` moves there.

    A full disk ends the writing but not the program; `finish` raises the error.

    Args:
        path: of the trace, for chrome://tracing or Perfetto. An earlier file stays until `finish`.
        facts: an object of JSON about what is traced, the file's `otherData`.
    """

    def __init__(self, path: str | os.PathLike[str], facts: Mapping[str, Any] | None = None) -> None:
        self._path = Path(path)
        self._facts = facts
        self._part = self._path.with_name(f".{self._path.name}.part")
        self._rows: dict[tuple[str, str], int] = {}
        self._named: set[tuple[int, int]] = set()
        self._file: IO[str] | None = None
        self._error: OSError | None = None
        self._separator = ""

    def write(self, spans: Iterable[Span]) -> None:
        """Adds spans; never raises for the disk."""
        if self._error is not None:
            return
        try:
            file = self._open()
            for event in _chrome_events(spans, self._rows, self._named):
                file.write(f"{self._separator}\n{json.dumps(event)}")
                self._separator = ","
            file.flush()
        except OSError as error:
            self._error = error

    def finish(self) -> None:
        """Completes the file and gives it its name.

        Raises:
            OSError: the first error of writing; an earlier file is then as it was.
        """
        try:
            if self._error is not None:
                raise self._error
            file = self._open()
            facts = "" if self._facts is None else f', "otherData": {json.dumps(self._facts)}'
            file.write(f"\n]{facts}}}\n")
            file.flush()
            os.fsync(file.fileno())
            self._part.replace(self._path)
        finally:
            self._close()

    def _open(self) -> IO[str]:
        if self._file is None:
            self._file = self._part.open("w", encoding="utf-8", newline="\n")
            self._file.write('{"traceEvents": [')
        return self._file

    def _close(self) -> None:
        try:
            if self._file is not None:
                self._file.close()
        except OSError:
            pass  # what the buffer still held; the first error is on its way
        self._part.unlink(missing_ok=True)


def _chrome_events(
    spans: Iterable[Span], rows: dict[tuple[str, str], int], named: set[tuple[int, int]]
) -> Iterable[dict[str, Any]]:
    for span in spans:
        pid = rows.setdefault((span.pool, span.host), len(rows) + 1)
        if (pid, span.rank) not in named:
            named.add((pid, span.rank))
            label = span.host if span.pool == span.host else f"{span.pool}: {span.host}"
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": span.rank, "args": {"name": label}}
            yield {
                "ph": "M",
                "name": "thread_name",
                "pid": pid,
                "tid": span.rank,
                "args": {"name": f"rank {span.rank}"},
            }
        yield _complete(pid, span.rank, f"{span.role}.{span.method}", span.ready_s, span.end_s, _arguments(span))
        if span.fetch_s > 0:
            yield _complete(pid, span.rank, "fetch", span.ready_s, span.fetched_s, {})
        for sub in span.sub_spans:
            yield _complete(pid, span.rank, sub.name, sub.start_s, sub.end_s, {"kind": sub.kind} if sub.kind else {})
        if span.store_s > 0:
            yield _complete(pid, span.rank, "store", span.computed_s, span.end_s, {})


def _complete(pid: int, rank: int, name: str, start_s: float, end_s: float, args: dict[str, Any]) -> dict[str, Any]:
    """A Chrome complete event; times are microseconds."""
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": rank,
        "ts": start_s * 1e6,
        "dur": max(0.0, end_s - start_s) * 1e6,
        "args": args,
    }


def _arguments(span: Span) -> dict[str, Any]:
    return {
        "call": span.call_id,
        "pool": span.pool,
        "queue_ms": round(span.queue_s * 1e3, 3),
        "fetch_ms": round(span.fetch_s * 1e3, 3),
        "compute_ms": round(span.compute_s * 1e3, 3),
        "store_ms": round(span.store_s * 1e3, 3),
        "bytes_read": span.bytes_read,
        "remote_bytes": span.remote_bytes,
        "bytes_written": span.bytes_written,
        "failed": span.failed,
        "kind": span.kind,
        **span.labels,
    }
