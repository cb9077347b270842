"""A Chrome trace that grows on the disk: spans are written as they end; a whole file takes its name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_controller.trace import Span

__all__ = ["ChromeTraceFile"]


class ChromeTraceFile:
    """Writes spans into a hidden file next to `path`, which `finish` moves there.

    A disk that takes no more ends the writing and no program: `finish` raises its error.

    Args:
        path: of the trace, for chrome://tracing or Perfetto. An earlier file stays until `finish`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
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
            file.write("\n]}\n")
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
            yield _complete(pid, span.rank, sub.name, sub.start_s, sub.end_s, {})
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
        "bytes_from_afar": span.bytes_from_afar,
        "bytes_written": span.bytes_written,
        "failed": span.failed,
        **span.labels,
    }
