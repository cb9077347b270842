"""docs/reference/simulator-errors.md says what `benchmarks/simulator_errors.py` measures."""

from __future__ import annotations

import pytest
import simulator_errors
from simulator_errors import MEASURED, build_constant_rows, find_worse, load_cases, read_block

from hf_mapper import estimate_memory
from hf_mapper.constants import FITS
from hf_mapper.measured import TrainingCase


def test_the_page_lists_the_shipped_constants_and_their_rows() -> None:
    assert read_block("constants") == list(build_constant_rows())
    for fit in FITS:
        assert len(fit.values) <= (2 if fit.stack == "links" else 4)
        assert fit.source and fit.models


@pytest.mark.skipif(not MEASURED.is_dir(), reason="the measured tables do not lie beside the repository")
def test_no_published_error_grew_by_more_than_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["simulator_errors.py", "--check"])
    assert simulator_errors.main() == 0


@pytest.mark.skipif(not MEASURED.is_dir(), reason="the measured tables do not lie beside the repository")
def test_runs_that_fitted_are_not_called_out_of_memory() -> None:
    runs = [case for case in load_cases(MEASURED) if isinstance(case, TrainingCase) and case.phase == "training"]
    refused = {(case.model.name, case.parallel.world_size) for case in runs if not fits(case)}
    assert len(runs) > 1000
    assert refused == set()


def fits(case: TrainingCase) -> bool:
    need = estimate_memory(
        case.model, case.cluster, case.parallel, case.workload, calls=("training",), backend=case.backend
    )
    return need.memory_bytes <= case.cluster.machine.gpu.usable_bytes


def test_growth_and_disappearance_are_found() -> None:
    published = [["a", "training", "A100", "9", "10.0"], ["b", "training", "A100", "9", "10.0"]]
    assert find_worse(published, [["a", "training", "A100", "9", "11.0"], published[1]]) == []
    worse = find_worse(published, [["a", "training", "A100", "9", "11.1"]])
    assert len(worse) == 2
    assert "11.1" in worse[0]
    assert "no longer measured" in worse[1]
