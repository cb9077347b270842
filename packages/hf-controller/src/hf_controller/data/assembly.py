"""Build one column out of rows of several shards: a view where it can be, else one copy; or view it in runs of rows."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy
import torch

from hf_controller.data.jagged import JaggedShapes, compute_offsets
from hf_controller.data.shard_cache import Holding, Taken
from hf_protocols import RowSelection

__all__ = ["Assembly", "BufferPool", "ColumnRuns", "Part"]

# Up to this many runs of neighbouring rows are copied run by run; beyond it, by index.
_MAX_RUNS = 16

# Below this the allocator of torch hands out memory fast enough.
_MIN_SPARE_BYTES = 4 * 2**20


class BufferPool:
    """Memory for joined rows, used again once nobody reads what was joined there.

    New memory costs more than the copy into it: the kernel clears every page at its first touch, and may stall to find
    huge ones. A rank joins batches of about the same size at every step, so it keeps the blocks that came back.

    Args:
        max_bytes: how much is kept at most; of more, what came back first is freed, and so is any larger block.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._blocks: list[numpy.ndarray] = []
        # Reentrant: collecting garbage may give a block back in the thread that is in here.
        self._lock = threading.RLock()

    @property
    def num_bytes(self) -> int:
        """Bytes that nobody uses."""
        return sum(block.nbytes for block in self._blocks)

    def lend(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] of uint8 with any content; its memory comes back when no tensor or array refers to it.

        A kept block serves if it is large enough and at most twice as large.
        """
        block = self._pop(num_bytes)
        if block is None:
            block = numpy.empty(num_bytes, dtype=numpy.uint8)  # numpy asks for huge pages
        lent = block[:num_bytes]  # only the tensor below refers to this array, and all its views to the tensor's memory
        weakref.finalize(lent, self._give_back, block).atexit = False
        return torch.from_numpy(lent)

    def _pop(self, num_bytes: int) -> numpy.ndarray | None:
        with self._lock:
            fitting = [block for block in self._blocks if num_bytes <= block.nbytes <= 2 * num_bytes]
            if not fitting:
                return None
            best = min(fitting, key=lambda block: block.nbytes)
            self._blocks = [block for block in self._blocks if block is not best]
            return best

    def _give_back(self, block: numpy.ndarray) -> None:
        if block.nbytes > self._max_bytes:
            return
        with self._lock:
            self._blocks.append(block)
            while self.num_bytes > self._max_bytes:
                self._blocks.pop(0)


_SPARE = BufferPool(max_bytes=512 * 2**20)


@dataclass(frozen=True)
class Part:
    """Rows to take, in order, from array number `array`: several parts may take from one array."""

    array: int
    rows: RowSelection


class Assembly:
    """Assembles the rows of one or more columns from arrays; index tensors are computed once for all columns.

    Args:
        parts: what to take, in the order of the result.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self._runs = [(part.array, start, stop) for part in parts for start, stop in part.rows.intervals]
        self._tokens: dict[tuple[int, ...], tuple[torch.Tensor, list[tuple[int, torch.Tensor, torch.Tensor]]]] = {}

    def build_dense(self, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        """[rows, *row_shape] from arrays of that form."""
        if not self._runs:
            return arrays[0][:0]
        if len(self._runs) == 1:
            array, start, stop = self._runs[0]
            return arrays[array][start:stop]
        if len(self._runs) <= _MAX_RUNS:
            return _join([arrays[array][start:stop] for array, start, stop in self._runs])
        return _scatter(arrays, self._row_indices)

    def build_jagged(
        self, arrays: Sequence[torch.Tensor], lengths: Sequence[torch.Tensor], shapes: JaggedShapes
    ) -> torch.Tensor:
        """A jagged [rows, tokens, *row_shape] from flat values [all tokens, *row_shape] and lengths [rows].

        `lengths` of several columns that are the same objects are worked out once.
        """
        shape = shapes.of(self.build_dense(lengths))
        if len(self._runs) <= _MAX_RUNS:
            starts = [compute_offsets(each) for each in lengths]
            spans = [(array, int(starts[array][low]), int(starts[array][high])) for array, low, high in self._runs]
            pieces = [arrays[array][low:high] for array, low, high in spans]
            values = arrays[0][:0] if not pieces else pieces[0] if len(pieces) == 1 else _join(pieces)
        else:
            values = _scatter(arrays, self._token_indices(lengths, shape.offsets))
        return shape.fill(values)

    @cached_property
    def _row_indices(self) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """For every array that is read: (array, its rows, their places in the result)."""
        arrays, starts, stops = torch.tensor(self._runs).unbind(1)
        counts = stops - starts
        places = counts.cumsum(0) - counts
        indices = []
        for array in dict.fromkeys(arrays.tolist()):
            (runs,) = (arrays == array).nonzero(as_tuple=True)
            source, target = (_count_on(each[runs], counts[runs]) for each in (starts, places))
            indices.append((array, source, target))
        return indices

    def _token_indices(
        self, lengths: Sequence[torch.Tensor], offsets: torch.Tensor
    ) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        key = tuple(map(id, lengths))
        if key not in self._tokens:
            indices = []
            for array, source, target in self._row_indices:
                counts = lengths[array].index_select(0, source).long()
                starts = compute_offsets(lengths[array]).index_select(0, source)
                places = offsets.index_select(0, target)
                indices.append((array, _count_on(starts, counts), _count_on(places, counts)))
            self._tokens[key] = offsets, indices
        return self._tokens[key][1]


def _count_on(starts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """For every run its start and the numbers after it, as many as it counts, one run after another."""
    within = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return starts.repeat_interleave(counts) + within


def _join(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of `pieces` one after another, in new memory."""
    result = _allocate(sum(map(len, pieces)), pieces[0])
    return torch.cat(list(pieces), out=result)


def _allocate(num_rows: int, like: torch.Tensor) -> torch.Tensor:
    """[num_rows, *row_shape] of any content."""
    num_bytes = num_rows * like.shape[1:].numel() * like.element_size()
    if num_bytes < _MIN_SPARE_BYTES:
        return like.new_empty((num_rows, *like.shape[1:]))
    return _SPARE.lend(num_bytes).view(like.dtype).view(num_rows, *like.shape[1:])


def _scatter(arrays: Sequence[torch.Tensor], indices: Sequence[tuple[int, torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    total = sum(len(target) for _, _, target in indices)
    result = _allocate(total, arrays[indices[0][0]])
    for array, source, target in indices:
        result.index_copy_(0, target, arrays[array].index_select(0, source))
    return result


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
