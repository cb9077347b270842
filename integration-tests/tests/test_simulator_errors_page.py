"""docs/reference/simulator-errors.md says what `benchmarks/simulator_errors.py` measures."""

from __future__ import annotations

import pytest
import simulator_errors
from simulator_errors import MEASURED, build_constant_rows, find_worse, load_cases, read_block

from hf_mapper import estimate_memory
from hf_mapper.constants import read_fits
from hf_mapper.measurements.cases import TrainingCase


def test_the_page_lists_the_shipped_constants_and_their_rows() -> None:
    assert read_block("constants") == list(build_constant_rows())
    for fit in read_fits():
        assert len(fit.values) <= (2 if fit.stack == "links" else 4)
        assert fit.source and fit.models


@pytest.mark.slow
@pytest.mark.skipif(not MEASURED.is_dir(), reason="the measured tables do not lie next to the repository")
def test_no_published_error_grew_by_more_than_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["simulator_errors.py", "--check"])
    assert simulator_errors.main() == 0


@pytest.mark.skipif(not MEASURED.is_dir(), reason="the measured tables do not lie next to the repository")
def test_runs_that_fitted_are_not_called_out_of_memory() -> None:
    runs = [case for case in load_cases(MEASURED) if isinstance(case, TrainingCase) and case.phase == "training"]
    refused = {(case.model.name, case.parallel.world_size) for case in runs if not fits(case)}
    assert len(runs) > 1000
    assert refused == set()


@pytest.mark.skipif(not MEASURED.is_dir(), reason="the measured tables do not lie next to the repository")
def test_every_measured_memory_is_met_within_a_tenth() -> None:
    cases = [case for case in load_cases(MEASURED) if case.phase == "memory"]
    off = {(case.source, case.measured): case.predict() / case.measured - 1 for case in cases}
    assert len(cases) == 20
    assert {case: error for case, error in off.items() if abs(error) > 0.1} == {}
    assert max(map(abs, off.values())) == pytest.approx(0.083, abs=5e-4), "as the page says"


def fits(case: TrainingCase) -> bool:
    need = estimate_memory(
        case.model, case.cluster, case.parallel, case.workload, calls=("training",), backend=case.backend
    )
    return need.memory_bytes <= case.cluster.machine.gpu.usable_bytes


def test_growth_and_disappearance_are_found() -> None:
    published = [row("a"), row("b")]
    assert find_worse(published, [row("a", mape="11.0"), published[1]]) == []
    worse = find_worse(published, [row("a", mape="11.1")])
    assert len(worse) == 2
    assert "11.1" in worse[0]
    assert "no longer measured" in worse[1]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, None),
        ({"unfitted": "5.5", "regret": "2.3 / 5.0"}, None),
        ({"unfitted": "5.6"}, "not fitted on: MAPE 5.6 %, published 5.0 %"),
        ({"unfitted": "-"}, "not fitted on: MAPE published, but no longer measured"),
        ({"regret": "2.4 / 4.5"}, "mean regret 2.4 %, published 2.0 %"),
        ({"regret": "2.0 / 5.1"}, "worst regret 5.1 %, published 4.5 %"),
        ({"regret": "-"}, "regret published, but no longer measured"),
    ],
)
def test_each_published_error_may_grow_by_a_tenth_only(changed: dict[str, str], named: str | None) -> None:
    worse = find_worse([row("a")], [row("a", **changed)])
    assert [named in line for line in worse if named] == ([True] if named else [])
    assert bool(worse) == bool(named)


def test_a_regret_of_nothing_may_be_rounded_up() -> None:
    assert find_worse([row("a", regret="0.0 / 0.0")], [row("a", regret="0.0 / 0.1")]) == []
    assert len(find_worse([row("a", regret="0.0 / 0.0")], [row("a", regret="0.2 / 0.2")])) == 2


def row(source: str, *, mape: str = "10.0", unfitted: str = "5.0", regret: str = "2.0 / 4.5") -> list[str]:
    return [source, "training", "A100", "9", mape, "1.0", "4", "14.0", "5", unfitted, "0.9", regret]
