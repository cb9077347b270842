"""Memory that a training rank shares with the engine's process of the same tensor-parallel rank.

It has no name in any file system: it is found through the rank's own descriptor, and goes when its processes end.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from hf_engine.resharding.boxes import Box
from hf_protocols.errors import ReshardError

__all__ = ["REPORT_BYTES", "Staging", "cut_buckets", "read_staging", "staged_bytes", "write_report"]

REPORT_BYTES = 4096
"""Of the memory, before the shards: the room for what a loader could not do."""
_ALIGNMENT = 64


class Staging:
    """This rank's side; it is taken when it is filled, grows to the largest bucket and is kept."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Bytes that the memory has now."""
        return self._memory.nbytes

    def fill(
        self,
        shards: Mapping[str, torch.Tensor],
        *,
        shapes: Mapping[str, Sequence[int]],
        boxes: Mapping[str, Box],
    ) -> str:
        """Copies the shards into the memory; returns the description that `load_staged` takes."""
        starts, end = [], REPORT_BYTES
        for shard in shards.values():
            starts.append(end)
            end += staged_bytes(shard.nbytes)
        self._reserve(end)
        for start, shard in zip(starts, shards.values(), strict=True):
            room = self._memory[start : start + shard.nbytes].view(shard.dtype).view(shard.shape)
            room.copy_(shard)
        self._memory[:REPORT_BYTES].zero_()
        described = [
            (name, list(shapes[name]), boxes[name].offset, boxes[name].shape, str(shard.dtype).split(".")[1], start)
            for (name, shard), start in zip(shards.items(), starts, strict=True)
        ]
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        return json.dumps({"path": path, "num_bytes": self.num_bytes, "shards": described})

    def check_report(self) -> None:
        """Raises what the loader could not do.

        Raises:
            ReshardError: with its message.
        """
        if report := bytes(self._memory[:REPORT_BYTES].numpy()).rstrip(b"\0").decode(errors="replace"):
            raise ReshardError(f"SGLang did not take the weights: {report}")

    def close(self) -> None:
        """Gives the memory back."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @torch.inference_mode(False)  # the memory is written again outside of that mode
    def _reserve(self, num_bytes: int) -> None:
        if self._file is None:
            self._file = os.memfd_create("hf-engine-staging", os.MFD_CLOEXEC)
        if num_bytes > self.num_bytes:
            os.ftruncate(self._file, num_bytes)
            self._memory = torch.frombuffer(mmap.mmap(self._file, num_bytes), dtype=torch.uint8)


def cut_buckets(names: Sequence[str], size_of: Callable[[str], int], most: int) -> Iterator[list[str]]:
    """Parameters that fit the memory together, at least one at a time.

    Args:
        names: in their order, the same on every rank.
        size_of: bytes of a parameter.
        most: bytes of a bucket with more than one.
    """
    bucket: list[str] = []
    taken = 0
    for name in names:
        size = size_of(name)
        if bucket and taken + size > most:
            yield bucket
            bucket, taken = [], 0
        bucket.append(name)
        taken += size
    if bucket:
        yield bucket


def staged_bytes(num_bytes: int) -> int:
    """Returns the bytes that a shard of `num_bytes` takes in the memory."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def read_staging(description: str) -> tuple[torch.Tensor, list[tuple[str, tuple[int, ...], Box, torch.Tensor]]]:
    """The same memory in another process of the machine, and what lies in it.

    Returns:
        uint8 [num_bytes], and for every shard its name, the parameter's full shape, its box and a view of it.
    """
    found = json.loads(description)
    file = os.open(found["path"], os.O_RDWR)
    try:
        memory = torch.frombuffer(mmap.mmap(file, found["num_bytes"]), dtype=torch.uint8)
    finally:
        os.close(file)
    shards = []
    for name, shape, offset, part_shape, dtype_name, start in found["shards"]:
        box, dtype = Box(tuple(offset), tuple(part_shape)), getattr(torch, dtype_name)
        part = memory[start : start + box.numel * dtype.itemsize].view(dtype).view(part_shape)
        shards.append((name, tuple(shape), box, part))
    return memory, shards


def write_report(staging: torch.Tensor, text: str) -> None:
    """Leaves a message for `Staging.check_report`."""
    written = text.encode()[: REPORT_BYTES - 1]
    staging[: len(written)] = torch.frombuffer(bytearray(written), dtype=torch.uint8)
