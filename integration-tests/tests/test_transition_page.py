"""docs/concepts/transition.md says what `benchmarks/transition_table.py` measures."""

from __future__ import annotations

import pytest
import transition_table
from transition_table import BEGIN, END, HEADER, LAYOUTS, PAGE, LayoutRow, build_rows, measure


def lines_of_the_page() -> list[str]:
    table = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    assert table.startswith(HEADER)
    return table.removeprefix(HEADER).splitlines(keepends=True)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|\n ").split("|")]


def test_formula_and_plan_of_every_row() -> None:
    rows, lines = build_rows(), lines_of_the_page()
    assert len({(row.train, row.generation, row.sharding) for row in rows}) == len(LAYOUTS) == 10
    for row, line in zip(rows, lines, strict=True):
        expected = cells(row.render(0, 0))
        for column in (0, 1, 2, 3, 5, 6, 7):
            assert cells(line)[column] == expected[column]


def test_a_row_says_formula_plan_and_counted_bytes_alike() -> None:
    for line in lines_of_the_page():
        _, method, formula, planned, counted, peak_formula, peak_planned, beside, peak = cells(line)
        assert counted == planned
        assert formula in (planned, "-")
        assert peak_formula in (peak_planned, "-")
        assert (float(beside) == 0) == (method == "hybridflow")
        held = float(peak_planned) + float(beside)
        assert held - transition_table.BUCKET_BYTES / 1024 <= float(peak) or "FSDP" in line
        assert float(peak) <= held + transition_table.BUCKET_BYTES / 1024


def again(rows: list[LayoutRow], wanted: list[int]) -> None:
    lines = lines_of_the_page()
    (size,) = {rows[index].num_ranks for index in wanted}
    assert measure(size, [rows[index] for index in wanted]) == [lines[index] for index in wanted]


@pytest.mark.slow
def test_some_rows_are_measured_again() -> None:
    rows = build_rows()
    kinds = {("1-4-1", "1-2"), ("2-2-1", "1-2"), ("1-1-4", "1-2")}
    again(rows, [i for i, row in enumerate(rows) if (row.train, row.generation) in kinds])


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_all_rows_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["transition_table.py", "--check"])
    assert transition_table.main() == 0
