"""docs/reference/conformance.md says what the committed runs of the conformance programs found."""

from __future__ import annotations

import json

import pytest
from conformance import ABSOLUTE, STATED, Comparison, find_failures
from conformance_page import PAGE, build_tables
from measurement import RESULTS

from hf_algorithms.recipes.conventions import CONVENTIONS

RUN = {"trl", "verl"}


def read_metrics(peer: str) -> dict[str, float]:
    result = json.loads((RESULTS / f"conformance_{peer}.json").read_text())
    return {name: metric["value"] for name, metric in result["metrics"].items()}


def test_the_page_holds_the_tables_of_the_committed_runs() -> None:
    text = PAGE.read_text()
    tables = build_tables()
    assert len(tables) == 2 * len(RUN) + len(CONVENTIONS)
    for name, table in tables.items():
        assert f"<!-- {name} -->\n\n{table}\n\n<!-- end of {name} -->\n" in text


@pytest.mark.parametrize("peer", sorted(RUN))
def test_committed_runs_are_as_stated(peer: str) -> None:
    metrics = read_metrics(peer)
    assert find_failures(metrics, STATED[peer]) == []
    compared = {name.partition("/")[0] for name in metrics}
    not_run = {"online_dpo"} if peer == "trl" else set()
    assert compared >= set(CONVENTIONS[peer]) - not_run


def test_failures_are_found_in_both_directions() -> None:
    found = {"a/loss": 0.0, "a/gradient": 2 * ABSOLUTE, "b/loss": 0.0, "c/loss": 0.5, "d/loss": float("inf")}
    lines = find_failures(found, {"b": "why", "c": "why", "e": "why"})
    assert [line.partition(":")[0] for line in lines] == ["e", "a", "b", "d"]


def test_nan_is_the_largest_difference() -> None:
    import torch

    comparison = Comparison()
    comparison.compare("a/loss", torch.tensor(float("nan")), torch.tensor(1.0))
    assert comparison.largest == {"a/loss": float("inf")}
