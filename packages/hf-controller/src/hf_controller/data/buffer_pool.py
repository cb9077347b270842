"""Memory for the rows that a process joins, kept for the next joins."""

from __future__ import annotations

import threading
import weakref

import numpy
import torch

__all__ = ["BufferPool", "allocate_rows"]

# Below this the allocator of torch hands out memory fast enough.
_MIN_SPARE_BYTES = 4 * 2**20


class BufferPool:
    """Memory for joined rows, reused once nothing refers to the rows that were joined there.

    New memory costs more than the copy into it: the kernel clears every page at its first touch, and may stall to find
    huge ones. A rank joins batches of about the same size at every step, so it keeps the blocks that came back.

    Args:
        max_bytes: bound on the memory that is kept. Beyond it, the blocks that came back first are freed; so is any
            block that is larger than the bound.
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


def allocate_rows(num_rows: int, like: torch.Tensor) -> torch.Tensor:
    """[num_rows, *row_shape] of any content."""
    num_bytes = num_rows * like.shape[1:].numel() * like.element_size()
    if num_bytes < _MIN_SPARE_BYTES:
        return like.new_empty((num_rows, *like.shape[1:]))
    return _SPARE.lend(num_bytes).view(like.dtype).view(num_rows, *like.shape[1:])
