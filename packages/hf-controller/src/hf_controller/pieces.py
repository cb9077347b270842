"""One column as runs of neighbouring rows, each of them a view: what a reader would have to join by copying."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from hf_controller.holdings import Holding, Taken
from hf_controller.jagged import JaggedShapes
from hf_protocols import RowSelection

if TYPE_CHECKING:
    import torch

__all__ = ["ColumnRuns"]


class ColumnRuns:
    """A column in pieces.

    Args:
        taken: what is taken, in order.
        held: for each the arrays that have it, and its rows in them.
        shapes: those of the reader.
    """

    def __init__(
        self, taken: Sequence[Taken], held: Sequence[tuple[Holding, RowSelection]], shapes: JaggedShapes
    ) -> None:
        self._shapes = shapes
        self._runs = [
            (each, holding, start, stop)
            for each, (holding, rows) in zip(taken, held, strict=True)
            for start, stop in rows.intervals
        ]
        self._empty = (taken[0], held[0][0], 0, 0)
        self._ends = list(accumulate(stop - start for _, _, start, stop in self._runs))

    @property
    def borders(self) -> list[int]:
        """Rows at which a run ends."""
        return self._ends

    def view(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop - 1` of the column, which lie within one run."""
        run = bisect_right(self._ends, start) if start < stop else -1
        taken, holding, first, last = self._runs[run] if run >= 0 else self._empty
        offset = 0 if run <= 0 else self._ends[run - 1]
        low, high = first + start - offset, first + stop - offset
        assert run < 0 or high <= last
        values = holding.values(taken.name)
        if taken.column.lengths is None:
            return values[low:high]
        lengths = holding.lengths(taken.column.lengths)
        begin, shape = int(lengths[:low].sum()), self._shapes.of(lengths[low:high])
        return shape.fill(values[begin : begin + int(shape.offsets[-1])])
