"""Weights in storages of their own, and the all-gather over replicas that megatron-core runs in its one storage.

megatron-core lays all parameters of a dtype into one flat storage. After a step, the replicas gather there the parts
that each of them has stepped. A transition frees whole storages, so it could free nothing of this one before the last
parameter has moved. megatron-core still decides how the flat order is split over replicas, and with it gradients,
masters and moments.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["WeightGather"]

_MAX_BYTES = 64 << 20


class WeightGather:
    """Gives every parameter a storage of its own, and gathers what the replicas stepped.

    Args:
        model: a stage wrapped in megatron-core's DistributedDataParallel, before its distributed optimizer is built.
        max_bytes: bound on the bytes that wait between gather and parameters, beyond one element of every replica.
    """

    def __init__(self, model: Any, *, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buckets: list[_Bucket] = []
        for buffer in (*model.buffers, *model.expert_parallel_buffers):
            for parameter in buffer.params:
                parameter.data = parameter.data.clone()
            buffer.param_data = None
            for bucket in buffer.buckets:
                bucket.param_data = None
                self._buckets.append(_Bucket(buffer, bucket))

    @torch.no_grad()
    def run(self) -> None:
        """Takes from every replica the part of the weights that it steps. Collective over data-parallel ranks."""
        for bucket in self._buckets:
            if bucket.group.size() > 1:
                self._gather(bucket)

    def _gather(self, bucket: _Bucket) -> None:
        """Some elements of every replica's part at a time: row r of `rows` is what replica r steps."""
        own, size, part = bucket.group.rank(), bucket.group.size(), bucket.part
        width = min(part, max(1, self._max_bytes // (size * bucket.dtype.itemsize)))
        staging = torch.empty(size * width, dtype=bucket.dtype, device=bucket.device)
        for first in range(0, part, width):
            rows = staging[: size * min(width, part - first)].view(size, -1)
            for parameter, row in bucket.overlaps(own * part + first, rows[own]):
                row.copy_(parameter)
            dist.all_gather_single(rows.view(-1), rows[own], group=bucket.group)
            for replica in range(size):
                if replica != own:
                    for parameter, row in bucket.overlaps(replica * part + first, rows[replica]):
                        parameter.copy_(row)


class _Bucket:
    """Parameters in megatron-core's flat order, which it splits into one equal part for every replica."""

    def __init__(self, buffer: Any, bucket: Any) -> None:
        self.group: dist.ProcessGroup = buffer.data_parallel_group
        self.dtype: torch.dtype = buffer.param_dtype
        self.device: torch.device = bucket.grad_data.device
        self.part = bucket.grad_data.numel() // self.group.size()
        starts = {parameter: buffer.param_index_map[parameter][0] - bucket.offset for parameter in bucket.params_list}
        self._parameters = sorted(starts, key=starts.__getitem__)
        self._starts = [starts[parameter] for parameter in self._parameters]

    def overlaps(self, start: int, elements: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of parameters, and of `elements`, which begin at `start` of the flat order, where they are the same."""
        stop = start + len(elements)
        for index in range(max(0, bisect_right(self._starts, start) - 1), len(self._starts)):
            begin, flat = self._starts[index], self._parameters[index].detach().view(-1)
            if begin >= stop:
                return
            low, high = max(begin, start), min(begin + len(flat), stop)
            if low < high:
                yield flat[low - begin : high - begin], elements[low - start : high - start]
