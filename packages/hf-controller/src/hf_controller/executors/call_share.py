"""Results that all ranks of a call work out alike, computed once for those that run in one process.

A rank in a process of its own works it out for itself, in time that grows with the number of ranks. Ranks that share a
process would otherwise take that time each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hf_protocols import MethodSpec, RowSelection, Topology

if TYPE_CHECKING:
    from hf_controller.data.expressions import ShardTable, Source

__all__ = ["CallShare"]


class CallShare:
    """The tables and splits that the ranks of one call share.

    Args:
        spec: the method's registration.
        topology: layout of the group.

    Attributes:
        tables: the sources of the call's inputs that were looked up so far.
    """

    def __init__(self, spec: MethodSpec, topology: Topology) -> None:
        self.tables: dict[Source, ShardTable] = {}
        self._spec = spec
        self._topology = topology
        self._splits: dict[int, list[RowSelection]] = {}
        self._collected: frozenset[int] | None = None

    def rows_of(self, rank: int, num_rows: int, weigh: Callable[[], list[float] | None]) -> RowSelection:
        """A rank's rows of a batch. Batches of equally many rows are split alike, so that their rows stay side by side.

        Args:
            rank: the rank.
            num_rows: rows of the whole batch.
            weigh: answers the tokens per row of the first such batch, or None.
        """
        if num_rows not in self._splits:
            self._splits[num_rows] = self._spec.protocol.distribute(self._topology, num_rows, weigh())
        return self._splits[num_rows][rank]

    def collects(self, rank: int) -> bool:
        """True if the rank's result is part of the call's."""
        if self._collected is None:
            self._collected = frozenset(self._spec.protocol.collect(self._topology).ranks)
        return rank in self._collected
