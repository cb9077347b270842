"""Reader of a run's files that accepts missing and damaged ones, as a killed run leaves them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_algorithms.report._json_values import parse_json
from hf_algorithms.report._metrics_file import MetricsFile
from hf_algorithms.report._sample_files import SampleFiles
from hf_protocols.errors import DataError

__all__ = ["RunFiles", "describe_end", "parse_settings", "read_run", "read_trace"]

_NAMES = ("config.toml", "metrics.jsonl", "summary.json", "trace.json")
_REMEDY = "Name the run.output_dir of a run"
_SHOWN_SET = "test"
"""Set whose responses are shown side by side: a run evaluates it before the first iteration and after the last."""


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The contents of a run's directory; empty where a file is absent.

    Attributes:
        name: of the directory.
        config_text: `config.toml` as it is.
        iterations: one per line of `metrics.jsonl`.
        columns: values of every metric at each iteration; NaN where a line does not have the metric.
        events: of the Chrome trace.
        samples: by moment (`before`, `after`), each a list of prompt, response, answer and score, of the test rows.
        unreadable: one sentence for each file, or line, that could not be read.
    """

    name: str
    config_text: str
    iterations: Sequence[float]
    columns: Mapping[str, Sequence[float]]
    summary: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]
    samples: Mapping[str, Sequence[Mapping[str, Any]]]
    unreadable: Sequence[str]

    @property
    def algorithm(self) -> str:
        """Name of the algorithm, or an empty string."""
        section = parse_settings(self.config_text).get("algorithm", {})
        return str(section.get("name", "")) if isinstance(section, dict) else ""


def read_run(directory: Path) -> RunFiles:
    """Reads those files of a run that exist.

    Raises:
        DataError: if no file exists.
    """
    unreadable: list[str] = []
    texts = {name: _read_text(directory / name, unreadable) for name in _NAMES if name != "metrics.jsonl"}
    metrics, samples = MetricsFile(directory / "metrics.jsonl"), SampleFiles(directory)
    metrics.refresh(has_ended=True)
    moments = samples.iterations()
    if not moments and not metrics.exists and not any(text is not None for text in texts.values()):
        raise DataError(f"{directory} holds no run: it has none of {', '.join(_NAMES)}, samples/. {_REMEDY}")
    summary = _parse_json("summary.json", texts, unreadable)
    trace = _parse_json("trace.json", texts, unreadable)
    iterations, columns = metrics.columns()
    return RunFiles(
        name=directory.resolve().name,
        config_text=texts["config.toml"] or "",
        iterations=iterations,
        columns=columns,
        summary=summary,
        events=_mappings(trace.get("traceEvents")),
        samples={
            "before": _read_samples(samples, moments[0], unreadable) if moments else [],
            "after": _read_samples(samples, moments[-1], unreadable) if len(moments) > 1 else [],
        },
        unreadable=[*metrics.notes, *unreadable],
    )


def describe_end(summary: Mapping[str, Any]) -> str:
    """The error with which a run ended, by its summary; an empty string without one."""
    error = summary.get("error")
    if not isinstance(error, Mapping):
        return ""
    return ": ".join(filter(None, (str(error.get("type") or ""), str(error.get("message") or ""))))


def read_trace(directory: Path) -> Sequence[Mapping[str, Any]]:
    """Returns the events of `trace.json`.

    Raises:
        DataError: when the file is absent, cannot be read or is not a Chrome trace.
    """
    name = "trace.json"
    unreadable: list[str] = []
    text = _read_text(directory / name, unreadable)
    if text is None and not unreadable:
        raise DataError(f"{directory} holds no {name}, which a run writes when it ends. {_REMEDY}")
    body = _parse_json(name, {name: text}, unreadable)
    if not unreadable and not isinstance(body.get("traceEvents"), list):
        unreadable.append(f"{name} is not a Chrome trace: it has no list 'traceEvents'")
    if unreadable:
        raise DataError(f"in {directory}: {unreadable[0]}")
    return _mappings(body["traceEvents"])


def _read_samples(files: SampleFiles, iteration: int, unreadable: list[str]) -> list[Mapping[str, Any]]:
    """The samples of the set that is shown."""
    rows, notes = files.read(iteration)
    unreadable += notes
    shown = [row for row in rows if row.set == _SHOWN_SET]
    columns = ("prompt", "response", "answer", "score", "extra")
    return [{name: found for name in columns if (found := getattr(row, name)) is not None} for row in shown]


def _read_text(path: Path, unreadable: list[str]) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        unreadable.append(f"{path.name} cannot be read: {error}")
        return None


def _parse_json(name: str, texts: Mapping[str, str | None], unreadable: list[str]) -> Mapping[str, Any]:
    text = texts[name]
    if text is None:
        return {}
    try:
        body = parse_json(text)
    except ValueError as error:
        unreadable.append(f"{name} is not JSON: {error}")
        return {}
    if not isinstance(body, dict):
        unreadable.append(f"{name} is not a JSON object")
        return {}
    return body


def parse_settings(text: str) -> Mapping[str, Any]:
    """Returns what a TOML text holds; empty where it cannot be read."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return {}


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
