"""Constants from measured tables: few, each with a meaning, fitted on some models and scored on others.

The loss is the mean of abs(log(predicted / measured)). It weighs predictions that are too slow and too fast alike and
does not follow outliers. Every model has the same weight, however many rows it has. The loss is minimised by the
simplex method of Nelder and Mead over the logarithms of the constants.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hf_mapper.constants import find_family
from hf_mapper.efficiency import EfficiencySpec
from hf_mapper.measurements.cases import TrainingCase, predict_steps
from hf_mapper.measurements.collectives import CollectiveCase
from hf_mapper.measurements.error_metrics import compute_bias, compute_mape
from hf_mapper.measurements.tables import MeasuredTable, SkipRow, read_tables
from hf_mapper.measurements.validation import Case, build_cases
from hf_mapper.specs import ClusterSpec
from hf_protocols import ConfigError
from hf_protocols.validation import show

__all__ = [
    "Calibration",
    "FreeConstants",
    "GroupError",
    "apply_constants",
    "calibrate_folder",
    "cross_validate",
    "find_free_constants",
    "fit_constants",
    "group_cases",
]

_START = {
    "training_flops": 0.7,
    "generation_flops": 0.7,
    "memory_bandwidth": 0.8,
    "training_bandwidth": 0.8,
    "half_size": 100.0,
    "training_latency_s": 2e-4,
    "layer_latency_s": 1e-4,
    "sequence_latency_s": 1e-5,
    "link_efficiency": 0.7,
    "intra_latency_s": 1e-5,
    "inter_latency_s": 1e-5,
}
_MOST = {
    "training_flops": 0.95,
    "training_bandwidth": 0.95,
    "generation_flops": 0.8,
    "memory_bandwidth": 0.95,
    "link_efficiency": 0.95,
}
"""No kernel and no link reaches more of its peak; a fit that asks for more misses work elsewhere."""

_MOST_ROWS = 40
"""Rows of one model that a calibration from the command line looks at; all of them are scored."""

FreeConstants = tuple[str, ...]

_TRAINING: FreeConstants = ("training_flops", "half_size", "training_bandwidth", "training_latency_s")
_GENERATION: FreeConstants = ("generation_flops", "memory_bandwidth", "layer_latency_s", "sequence_latency_s")
_LINKS: FreeConstants = ("link_efficiency", "intra_latency_s")


@dataclass(frozen=True, kw_only=True)
class GroupError:
    """One model (or sweep, or kind of collective) that was left out of a fit: its rows, and its error there."""

    group: str
    rows: int
    mape: float
    bias: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Constants of a GPU family with a software stack, their error on the rows they come from, and out of sample.

    `left_out` has an entry for each model (of one model: each sweep), scored under constants fitted on the others.
    """

    gpu: str
    stack: str
    rows: int
    constants: Mapping[str, float]
    mape: float
    left_out: tuple[GroupError, ...]


def calibrate_folder(folder: Path | str, *, stack: str | None = None, steps: int = 120) -> list[Calibration]:
    """Fits every GPU family and software stack of `folder`; links first, which the others then have.

    Raises:
        ConfigError: as `read_tables`, or where no row is of `stack`.
    """
    groups = group_cases(read_tables(Path(folder)))
    chosen = {key: cases for key, cases in groups.items() if stack in (None, key[1])}
    if not chosen:
        known = sorted({name for _, name in groups})
        raise ConfigError(f"{folder}: no usable row of stack {show(stack)}; stacks there: {', '.join(known) or 'none'}")
    found: list[Calibration] = []
    for (family, name), cases in sorted(chosen.items(), key=lambda item: (item[0][1] != "links", item[0])):
        links = [
            calibration.constants for calibration in found if (calibration.gpu, calibration.stack) == (family, "links")
        ]
        found.append(
            _calibrate(family, name, [apply_constants(case, links[0]) for case in cases] if links else cases, steps)
        )
    return found


def _calibrate(family: str, stack: str, cases: Sequence[Case], steps: int) -> Calibration:
    names = find_free_constants(cases)
    values = fit_constants(cases, names, steps=steps, most_rows=_MOST_ROWS)
    predicted = [apply_constants(case, values).predict() for case in cases]
    return Calibration(
        gpu=family,
        stack=stack,
        rows=len(cases),
        constants=values,
        mape=compute_mape(predicted, [case.measured for case in cases]),
        left_out=tuple(cross_validate(cases, names, steps=steps, most_rows=_MOST_ROWS)),
    )


def group_cases(tables: Sequence[MeasuredTable]) -> dict[tuple[str, str], list[Case]]:
    """The times in `tables` by (GPU family, software stack): what one set of constants is for."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for table in tables:
        for _, found in build_cases(table):
            if isinstance(found, SkipRow):
                continue
            for case in found:
                if case.phase != "memory":
                    groups.setdefault((_family(case), case.stack), []).append(case)
    return groups


def find_free_constants(cases: Sequence[Case]) -> FreeConstants:
    """Returns the names of the constants that such cases determine."""
    phases = {case.phase for case in cases}
    return _LINKS if "communication" in phases else _TRAINING if "training" in phases else _GENERATION


def fit_constants(
    cases: Sequence[Case], names: FreeConstants, *, steps: int = 120, most_rows: int | None = None
) -> dict[str, float]:
    """The values of `names` with the least loss over `cases`, in three digits; other constants stay.

    `most_rows` of each model are looked at, evenly spaced; by default all.

    Raises:
        ConfigError: for no case.
    """
    if not cases:
        raise ConfigError("no row to calibrate on. Pass a table with measured times of the wanted GPU and software")
    cases = _thin(cases, most_rows) if most_rows else cases
    measured = np.array([case.measured for case in cases])
    counts = Counter(case.fit_group for case in cases)
    weights = np.array([1 / (len(counts) * counts[case.fit_group]) for case in cases])
    begin = np.log([_START[name] for name in names])

    def loss(point: NDArray[np.float64]) -> float:
        values = dict(zip(names, np.exp(point).tolist(), strict=True))
        if any(values[name] > most for name, most in _MOST.items() if name in values):
            return math.inf
        predicted = _predict(cases, values)
        return float((weights * np.abs(np.log(predicted / measured))).sum())

    best = _minimise(loss, begin, steps)
    return {name: float(f"{math.exp(value):.3g}") for name, value in zip(names, best, strict=True)}


def cross_validate(
    cases: Sequence[Case], names: FreeConstants, *, steps: int = 120, most_rows: int | None = None
) -> list[GroupError]:
    """Returns each model's error under constants fitted on all other models; of one model alone, each sweep's error.

    Empty if there is only one model with one sweep.
    """
    groups = _list_groups(cases)
    errors = []
    for left_out in sorted(set(groups)) if len(set(groups)) > 1 else ():
        others = [case for case, group in zip(cases, groups, strict=True) if group != left_out]
        values = fit_constants(others, names, steps=steps, most_rows=most_rows)
        scored = [apply_constants(case, values) for case, group in zip(cases, groups, strict=True) if group == left_out]
        predicted, measured = [case.predict() for case in scored], [case.measured for case in scored]
        errors.append(
            GroupError(
                group=left_out,
                rows=len(scored),
                mape=compute_mape(predicted, measured),
                bias=compute_bias(predicted, measured),
            )
        )
    return errors


def _list_groups(cases: Sequence[Case]) -> list[str]:
    """Returns for each case the unit that it is left out with: its model, or its sweep if all are of one model."""
    groups = [case.fit_group for case in cases]
    if len(set(groups)) > 1:
        return groups
    return [case.fit_group if isinstance(case, CollectiveCase) else case.sweep for case in cases]


def _thin(cases: Sequence[Case], most: int) -> list[Case]:
    """At most `most` cases of each group, evenly spaced in their order."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.fit_group, []).append(case)
    return [case for group in groups.values() for case in group[:: -(-len(group) // most)]]


def _family(case: Case) -> str:
    return find_family(case.cluster.machine.gpu.kind)


def apply_constants(case: Case, values: Mapping[str, float]) -> Case:
    """`case` with some constants of its GPU or of its links replaced."""
    efficiency = case.cluster.machine.gpu.efficiency
    known = {field.name for field in fields(EfficiencySpec)}
    own = {name: value for name, value in values.items() if name in known}
    links = {name: value for name, value in values.items() if name not in known}
    kept = {name: getattr(efficiency, name) for name in known}
    return case.with_constants(EfficiencySpec(**{**kept, **own}), **links)


def _predict(cases: Sequence[Case], values: Mapping[str, float]) -> NDArray[np.float64]:
    """Returns what every case would take `[B]` with some constants replaced, once for each cluster."""
    clusters: dict[ClusterSpec, ClusterSpec] = {}
    changed: list[Case] = []
    for case in cases:
        if case.cluster not in clusters:
            clusters[case.cluster] = apply_constants(case, values).cluster
        changed.append(replace(case, cluster=clusters[case.cluster]))
    steps = [case for case in changed if isinstance(case, TrainingCase) and case.phase == "training"]
    if len(steps) == len(changed):
        return predict_steps(steps)
    return np.array([case.predict() for case in changed])


def _minimise(
    loss: Callable[[NDArray[np.float64]], float], begin: NDArray[np.float64], steps: int
) -> NDArray[np.float64]:
    """Nelder and Mead's simplex with the usual coefficients."""
    simplex = [begin, *(begin + 0.3 * axis for axis in np.eye(len(begin)))]
    values = [loss(point) for point in simplex]
    for _ in range(steps):
        order = np.argsort(values)
        simplex, values = [simplex[index] for index in order], [values[index] for index in order]
        centre, worst = np.mean(simplex[:-1], axis=0), simplex[-1]
        tried = centre + (centre - worst)
        found = loss(tried)
        if found < values[0]:
            farther = centre + 2 * (centre - worst)
            beyond = loss(farther)
            tried, found = (farther, beyond) if beyond < found else (tried, found)
        elif found >= values[-2]:
            tried = centre + 0.5 * (worst - centre)
            found = loss(tried)
            if found >= values[-1]:
                simplex = [simplex[0], *(simplex[0] + 0.5 * (point - simplex[0]) for point in simplex[1:])]
                values = [values[0], *(loss(point) for point in simplex[1:])]
                continue
        simplex[-1], values[-1] = tried, found
    return simplex[int(np.argmin(values))]
