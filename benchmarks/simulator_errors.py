"""The tables of docs/reference/simulator-errors.md: shipped constants, what they were fitted on, and the errors.

    simulator_errors.py FOLDER              writes the errors of the shipped constants into the page
    simulator_errors.py FOLDER --check      exits with 1 where an error is more than a tenth above the published one
    simulator_errors.py FOLDER --refit      prints the values of hf_mapper/constants.toml, fitted again
    simulator_errors.py FOLDER --left-out   writes the errors of calibrations on other sweeps and models into the page

FOLDER holds the measured tables; by default ../shared/perf-data next to the repository.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hf_mapper.constants import Fit, find_family, read_fits
from hf_mapper.measurements.calibration import (
    GroupError,
    apply_constants,
    cross_validate,
    find_free_constants,
    fit_constants,
)
from hf_mapper.measurements.error_metrics import compute_bias, compute_mape, compute_spearman
from hf_mapper.measurements.tables import SkipRow, read_tables
from hf_mapper.measurements.validation import Case, build_cases, compute_sweeps

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT.parent / "shared" / "perf-data"
PAGE = ROOT / "docs" / "reference" / "simulator-errors.md"
GROWTH = 1.1
COMPARED = (
    (4, ("MAPE",), 0.0),
    (9, ("not fitted on: MAPE",), 0.0),
    (11, ("mean regret", "worst regret"), 0.1),
)
"""Columns of the errors that may not grow, what is in them, and how much more is rounding: some regrets are 0."""
ERRORS = (
    "| source | phase | GPU | rows | MAPE | bias | fitted on: rows | MAPE | not fitted on: rows | MAPE "
    "| Spearman | regret mean / worst |"
)
CONSTANTS = "| GPU | software | constants | fitted on |"
LEFT_OUT = "| GPU, software | left out | rows | MAPE | bias |"
OTHER_SWEEP = ("GPT-18.4B", "GPT-39.1B")


def main() -> int:
    """Write or check the page; see the module's text."""
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    folder = Path(words[0]) if words else MEASURED
    if "--refit" in sys.argv:
        return _refit(load_cases(folder))
    if "--left-out" in sys.argv:
        write_block("left out", LEFT_OUT, list(build_left_out(load_cases(folder))))
        return 0
    rows = list(build_error_rows(load_cases(folder)))
    if "--check" in sys.argv:
        worse = find_worse(read_block("errors"), rows)
        print("\n".join(worse) or "no error grew by more than a tenth")
        return bool(worse)
    write_block("errors", ERRORS, rows)
    write_block("constants", CONSTANTS, list(build_constant_rows()))
    return 0


def load_cases(folder: Path) -> list[Case]:
    """Everything in `folder` that can be compared, in its order."""
    found = [cases for table in read_tables(folder) for _, cases in build_cases(table)]
    return [case for cases in found if not isinstance(cases, SkipRow) for case in cases]


def build_constant_rows() -> Iterator[list[str]]:
    for fit in read_fits():
        values = ", ".join(f"{name} {value:.3g}" for name, value in fit.values.items())
        yield [fit.gpu, fit.stack, values, f"{fit.source}: {', '.join(fit.models)}"]


def build_error_rows(cases: Sequence[Case]) -> Iterator[list[str]]:
    groups: dict[tuple[str, str, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((_describe_source(case), case.phase, case.gpu), []).append(case)
    for key, group in groups.items():
        fitted = [case for case in group if any(_is_fitted(case, fit) for fit in read_fits())]
        others = [case for case in group if case not in fitted]
        predicted, measured = [case.predict() for case in group], [case.measured for case in group]
        rank = compute_spearman(predicted, measured)
        regrets = [sweep.regret for sweep in compute_sweeps(group, predicted)]
        yield [
            *key,
            str(len(group)),
            _percent(compute_mape(predicted, measured)),
            _percent(compute_bias(predicted, measured)),
            *_part(fitted),
            *_part(others),
            "-" if rank is None else f"{rank:.3f}",
            f"{_percent(sum(regrets) / len(regrets))} / {_percent(max(regrets))}" if regrets else "-",
        ]


def build_left_out(cases: Sequence[Case]) -> Iterator[list[str]]:
    """Each multi-machine sweep by constants of the other; then each model by constants of the others."""
    sweeps = [case for case in cases if case.phase == "training" and case.fit_group in OTHER_SWEEP]
    sweeps = [case for case in sweeps if "vTrain" in case.source]
    for error in cross_validate(sweeps, find_free_constants(sweeps)):
        yield _left_out_row("a100, megatron-2021, the other sweep only", error)
    for gpu, stack in (("a100", "pytorch"), ("h100", "pytorch"), ("a100", "lmdeploy"), ("a100", "vllm-2023")):
        own = [case for case in cases if case.stack == stack and _family(case) == gpu and case.phase != "memory"]
        for error in cross_validate(own, find_free_constants(own)):
            yield _left_out_row(f"{gpu}, {stack}", error)


def find_worse(published: Sequence[Sequence[str]], rows: Sequence[Sequence[str]]) -> list[str]:
    """Each error that grew by more than a tenth, or is no longer there."""
    now = {tuple(row[:3]): row for row in rows}
    worse = []
    for row in published:
        key = tuple(row[:3])
        if key not in now:
            worse.append(f"{key}: published, but no longer measured")
        else:
            worse += [f"{key}: {growth}" for growth in _list_growth(row, now[key])]
    return worse


def _list_growth(published: Sequence[str], now: Sequence[str]) -> Iterator[str]:
    for column, names, slack in COMPARED:
        before, after = published[column], now[column]
        if before == "-":
            continue
        if after == "-":
            yield f"{', '.join(names)} published, but no longer measured"
            continue
        for name, old, new in zip(names, before.split(" / "), after.split(" / "), strict=True):
            if float(new) > GROWTH * float(old) + slack:
                yield f"{name} {new} %, published {old} %"


def read_block(name: str) -> list[list[str]]:
    """The rows of a table of the page, as texts."""
    text = PAGE.read_text().partition(f"<!-- {name} -->\n")[2].partition("<!-- end -->")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.strip().splitlines()[2:]]


def write_block(name: str, header: str, rows: Sequence[Sequence[str]]) -> None:
    """Put a table between a mark with `name` and the next end mark."""
    before, begin, rest = PAGE.read_text().partition(f"<!-- {name} -->\n")
    lines = [header, "|" + "---|" * header.count(" |"), *("| " + " | ".join(row) + " |" for row in rows)]
    PAGE.write_text(before + begin + "\n".join(lines) + "\n" + "<!-- end -->" + rest.partition("<!-- end -->")[2])


def _refit(cases: Sequence[Case]) -> int:
    links: dict[str, dict[str, float]] = {}
    for fit in sorted(read_fits(), key=lambda fit: fit.stack != "links"):
        own = [apply_constants(case, links.get(fit.gpu, {})) for case in cases if _is_fitted(case, fit)]
        values = fit_constants(own, find_free_constants(own))
        if fit.stack == "links":
            links[fit.gpu] = values
        print(fit.gpu, fit.stack, values)
    return 0


def _is_fitted(case: Case, fit: Fit) -> bool:
    if case.phase == "memory" or (_family(case), case.stack) != (fit.gpu, fit.stack) or fit.source not in case.source:
        return False
    return case.fit_group.startswith(fit.models)


def _family(case: Case) -> str:
    return find_family(case.cluster.machine.gpu.kind)


def _describe_source(case: Case) -> str:
    """The source; of training runs with both, those on one machine and on several apart."""
    if "vTrain (MICRO24)" not in case.source:
        return case.source
    return f"{case.source}, {'one machine' if case.cluster.num_gpus <= 8 else 'several machines'}"


def _part(cases: Sequence[Case]) -> tuple[str, str]:
    if not cases:
        return "-", "-"
    return str(len(cases)), _percent(
        compute_mape([case.predict() for case in cases], [case.measured for case in cases])
    )


def _left_out_row(name: str, error: GroupError) -> list[str]:
    return [name, error.group, str(error.rows), _percent(error.mape), _percent(error.bias)]


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}"


if __name__ == "__main__":
    sys.exit(main())
