"""A run that faults strike, and that goes on each time, ends as one that none struck: `make soak` has more of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak import Soak, draw_fault
from soak_faults import Fault

FAULTS = (
    Fault(kind="SIGKILL", victim="controller", phase="commit, before COMMIT", count=2, delay_s=0.0),
    Fault(kind="SIGKILL", victim="controller", phase="update", count=2, delay_s=0.001),
    Fault(kind="disk full", victim="controller", phase="commit, before its data", count=1, delay_s=0.0),
    Fault(kind="SIGSTOP", victim="controller", phase="generation", count=1, delay_s=0.0),
)


@pytest.mark.slow
def test_a_run_that_is_struck_ends_as_one_that_is_not(tmp_path: Path) -> None:
    with Soak(tmp_path, "in_process", num_iterations=4) as soak:
        found = list(soak.strike_run(0, FAULTS))
    assert [each for each in found if isinstance(each, str) or each.problems] == []
    assert [each.ended.code for each in found if not isinstance(each, str)] == [-9, -9, 1, 0]


def test_faults_are_drawn_from_their_numbers() -> None:
    drawn = [[draw_fault("ray", run, place) for place in range(5)] for run in range(12)]
    assert drawn == [[draw_fault("ray", run, place) for place in range(5)] for run in range(12)]
    assert {(each.kind, each.victim) for run in drawn[:2] for each in run} == {("SIGKILL", "controller")}
    assert len({(each.kind, each.victim, each.phase) for run in drawn for each in run}) > 30
