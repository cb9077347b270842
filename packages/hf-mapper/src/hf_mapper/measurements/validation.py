"""The simulators against measured tables: which rows were used, how far off, and whether the best was found."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_mapper.measurements.cases import TrainingCase, build_training_cases
from hf_mapper.measurements.collectives import CollectiveCase, build_collective_cases
from hf_mapper.measurements.error_metrics import compute_bias, compute_mape, compute_regret, compute_spearman
from hf_mapper.measurements.generation import GenerationCase, build_generation_cases
from hf_mapper.measurements.tables import MeasuredTable, Row, SkipRow, read_tables

__all__ = [
    "Case",
    "SourceErrors",
    "SweepErrors",
    "build_cases",
    "build_report",
    "compute_errors",
    "compute_sweeps",
    "validate_folder",
]

Case = TrainingCase | GenerationCase | CollectiveCase

_LEAST_SWEEP = 3
_UNSIMULATED = {
    "kernel": "times of single kernels are not predicted",
    "iteration": "lengths and phases of whole RLHF iterations are not stated",
}


@dataclass(frozen=True, kw_only=True)
class SweepErrors:
    """Runs of one model on as many GPUs with the same batch, by layout."""

    name: str
    rows: int
    spearman: float | None
    regret: float


@dataclass(frozen=True, kw_only=True)
class SourceErrors:
    """Errors over one source's measurements of one phase on one GPU, as fractions; None where no row was used.

    `rows_used`: those that measured the phase. A skipped row counts with the first phase of its source and GPU only.
    `software`: what the simulators took the rows to run; it is not in the report.
    """

    source: str
    file: str
    phase: str
    gpu: str
    rows_used: int
    rows_skipped: dict[str, int]
    mape: float | None
    bias: float | None
    spearman: float | None
    sweeps: tuple[SweepErrors, ...]
    software: tuple[str, ...]


def validate_folder(folder: Path | str) -> list[SourceErrors]:
    """Errors of every source in `folder`, by file and in order of their rows.

    Raises:
        ConfigError: for a folder that cannot be read or holds no table, or a table without the columns it needs.
    """
    return [errors for table in read_tables(Path(folder)) for errors in compute_errors(table)]


def build_report(errors: Sequence[SourceErrors]) -> dict[str, Any]:
    """Returns the object that `hf-mapper validate --json` prints."""
    sources = [asdict(source) for source in errors]
    return {"sources": [{key: source[key] for key in source if key != "software"} for source in sources]}


def build_cases(table: MeasuredTable) -> Iterator[tuple[Row, Sequence[Case] | SkipRow]]:
    """For every row what can be compared with a simulator's answer, or why nothing can."""
    if table.kind in _UNSIMULATED:
        yield from ((row, SkipRow(_UNSIMULATED[table.kind])) for row in table.rows)
    elif table.kind == "generation":
        yield from build_generation_cases(table)
    elif table.kind == "communication":
        yield from build_collective_cases(table)
    else:
        yield from build_training_cases(table)


def compute_errors(table: MeasuredTable) -> list[SourceErrors]:
    """One entry for each source, phase and GPU of a table."""
    used: dict[tuple[str, str, str], list[Case]] = defaultdict(list)
    rows: Counter[tuple[str, str, str]] = Counter()
    skipped: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for row, found in build_cases(table):
        where = (row.get("source", ""), row.get("gpu", ""))
        if isinstance(found, SkipRow):
            skipped[where][str(found)] += 1
            if not any(key[::2] == where for key in used):
                used[where[0], table.kind, where[1]] = []
            continue
        for case in found:
            used[case.source, case.phase, case.gpu].append(case)
        rows.update({(case.source, case.phase, case.gpu) for case in found})
    filled = {key[::2] for key, cases in used.items() if cases}
    listed = [key for key, cases in used.items() if cases or key[::2] not in filled]
    return [_summarise(table.file, key, used[key], rows[key], skipped.pop(key[::2], Counter())) for key in listed]


def _summarise(
    file: str, key: tuple[str, str, str], cases: Sequence[Case], rows: int, skipped: Mapping[str, int]
) -> SourceErrors:
    predicted, measured = [case.predict() for case in cases], [case.measured for case in cases]
    return SourceErrors(
        source=key[0] or file,
        file=file,
        phase=key[1],
        gpu=key[2],
        rows_used=rows,
        rows_skipped=dict(skipped),
        mape=compute_mape(predicted, measured) if cases else None,
        bias=compute_bias(predicted, measured) if cases else None,
        spearman=compute_spearman(predicted, measured),
        sweeps=compute_sweeps(cases, predicted),
        software=tuple(dict.fromkeys(case.software for case in cases)),
    )


def compute_sweeps(cases: Sequence[Case], predicted: Sequence[float]) -> tuple[SweepErrors, ...]:
    """The sweeps among runs: one model on as many GPUs with one batch, three runs or more in two layouts."""
    sweeps: dict[str, list[int]] = defaultdict(list)
    for index, case in enumerate(cases):
        if not isinstance(case, CollectiveCase) and case.phase != "memory":
            sweeps[case.sweep].append(index)
    return tuple(
        _summarise_sweep(name, [predicted[row] for row in rows], [cases[row].measured for row in rows])
        for name, rows in sweeps.items()
        if len(rows) >= _LEAST_SWEEP and len({_layout(cases[row]) for row in rows}) > 1
    )


def _layout(case: Case) -> tuple[object, ...]:
    """Returns the values that a sweep varies; repeats of one layout are not a sweep."""
    if isinstance(case, GenerationCase):
        return (case.generation,)
    assert isinstance(case, TrainingCase), "collectives have no sweeps"
    return case.parallel, case.workload.micro_batch_tokens, case.workload.recompute, case.workload.pipeline_chunks


def _summarise_sweep(name: str, predicted: Sequence[float], measured: Sequence[float]) -> SweepErrors:
    return SweepErrors(
        name=name,
        rows=len(measured),
        spearman=compute_spearman(predicted, measured),
        regret=compute_regret(predicted, measured),
    )
