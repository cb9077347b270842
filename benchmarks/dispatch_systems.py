"""Three ways from four producers to the consumers of `bench_dispatch`, behind one interface.

All hold the same rows, deliver them as TensorDicts, and hand these to the same function, `read_every_byte`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import numpy
import ray
import torch
from tensordict import TensorDict

from hf_controller import RayExecutor, ResourcePool, Worker, WorkerContext, WorkerSpec, as_pieces
from hf_protocols import DP, ParallelSpec, Topology, register

NUM_PRODUCERS = 4
ROW_ITEMS = 512
"""int64 numbers in a row: 4 KiB."""


def build_rows(num_rows: int) -> torch.Tensor:
    """One producer's rows, int64 [num_rows, ROW_ITEMS], or 4 rows of no bytes."""
    if num_rows == 0:
        return torch.empty(NUM_PRODUCERS, 0, dtype=torch.int64)
    return torch.arange(ROW_ITEMS).repeat(num_rows, 1)


def read_every_byte(pieces: Sequence[TensorDict]) -> int:
    """Sum every number of every piece."""
    return sum(int(piece["rows"].sum()) for piece in pieces)


def expected_sum(num_rows: int) -> int:
    """Returns the result of `read_every_byte` for the rows of all producers."""
    return NUM_PRODUCERS * num_rows * (ROW_ITEMS * (ROW_ITEMS - 1) // 2)


class DispatchSystem(Protocol):
    """One way to move rows."""

    def move(self, num_rows: int, num_consumers: int, *, contiguous: bool) -> int:
        """Let every producer return `num_rows` rows and the consumers read them; the sum of all that was read."""
        ...

    def call(self) -> None:
        """A call of nothing on four consumers, until all are done."""
        ...


class ProducerWorker(Worker):
    """Returns rows that it has made before."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._rows = build_rows(0)
        self._num_rows = 0

    @register(protocol=DP, rows="unknown")
    def produce(self, num_rows: int) -> TensorDict:
        if num_rows != self._num_rows:
            self._rows, self._num_rows = build_rows(num_rows), num_rows
        return TensorDict({"rows": self._rows}, batch_size=[len(self._rows)])


class ConsumerWorker(Worker):
    """Reads what it gets."""

    @register(protocol=DP, returns="metrics")
    def nothing(self) -> dict[str, tuple[float, float]]:
        return {}

    @register(protocol=DP, returns="metrics")
    def read(self, batch: TensorDict) -> dict[str, tuple[float, float]]:
        return {"sum": (read_every_byte([batch]), 1)}

    @register(protocol=DP, returns="metrics")
    @as_pieces
    def read_pieces(self, batch: list[TensorDict]) -> dict[str, tuple[float, float]]:
        return {"sum": (read_every_byte(batch), 1)}


class ControllerSystem:
    """The controller: one future from group to group."""

    def __init__(self, executor: RayExecutor) -> None:
        self.producers = _build_group(executor, "producers", ProducerWorker, NUM_PRODUCERS)
        self.consumers = {count: _build_group(executor, f"to{count}", ConsumerWorker, count) for count in (4, 2)}

    def move(self, num_rows: int, num_consumers: int, *, contiguous: bool) -> int:
        group = self.consumers[num_consumers]
        read = group.read if contiguous else group.read_pieces
        return round(read(self.producers.produce(num_rows)).result()["sum"] * num_consumers)

    def call(self) -> None:
        self.consumers[4].nothing().result()


def _build_group(executor: RayExecutor, role: str, worker: type[Worker], size: int) -> Any:
    spec = WorkerSpec(worker=worker, topology=Topology(ParallelSpec(dp_size=size)))
    return executor.build_groups(ResourcePool([size], device="cpu", name=role), {role: spec})[role]


class PlainProducer:
    """Returns rows that it has made before, as an array: the form that Ray's store moves without a further copy."""

    def __init__(self) -> None:
        self._rows = build_rows(0)
        self._num_rows = 0

    def produce(self, num_rows: int) -> numpy.ndarray:
        if num_rows != self._num_rows:
            self._rows, self._num_rows = build_rows(num_rows), num_rows
        return self._rows.numpy()

    def produce_tensor(self, num_rows: int) -> torch.Tensor:
        self.produce(num_rows)
        return self._rows


class PlainConsumer:
    """Reads what it gets."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")

    def nothing(self) -> dict[str, tuple[float, float]]:
        return {}

    def read(self, contiguous: bool, *arrays: numpy.ndarray) -> int:
        pieces = [torch.from_numpy(array) for array in arrays]
        if contiguous and len(pieces) > 1:
            pieces = [torch.cat(pieces)]
        return read_every_byte([TensorDict({"rows": piece}, batch_size=[len(piece)]) for piece in pieces])

    def read_tensor(self, rows: torch.Tensor) -> int:
        return read_every_byte([TensorDict({"rows": rows}, batch_size=[len(rows)])])


class PlainActors:
    """Actors of both systems without the controller."""

    def __init__(self) -> None:
        self.producers = [_start(PlainProducer) for _ in range(NUM_PRODUCERS)]
        self.consumers = [_start(PlainConsumer) for _ in range(4)]


def _start(kind: type) -> Any:
    remote: Any = ray.remote(num_cpus=0)(kind)
    return remote.remote()


class ReferenceSystem:
    """The floor: the driver hands each producer's bare reference to the consumer of its rows."""

    def __init__(self, actors: PlainActors) -> None:
        self._actors = actors

    def move(self, num_rows: int, num_consumers: int, *, contiguous: bool) -> int:
        shards = [producer.produce.remote(num_rows) for producer in self._actors.producers]
        share = NUM_PRODUCERS // num_consumers
        read = [
            self._actors.consumers[rank].read.remote(contiguous, *shards[rank * share : (rank + 1) * share])
            for rank in range(num_consumers)
        ]
        return sum(ray.get(read))

    def call(self) -> None:
        ray.get([consumer.nothing.remote() for consumer in self._actors.consumers])


class MediatedSystem(ReferenceSystem):
    """The baseline: workers return tensors, the driver gets them all, concatenates and splits them, and puts each
    part.
    """

    def move(self, num_rows: int, num_consumers: int, *, contiguous: bool) -> int:
        shards = ray.get([producer.produce_tensor.remote(num_rows) for producer in self._actors.producers])
        parts = [ray.put(part.clone()) for part in torch.cat(shards).tensor_split(num_consumers)]
        read = [self._actors.consumers[rank].read_tensor.remote(part) for rank, part in enumerate(parts)]
        return sum(ray.get(read))


class MediatedArraysSystem(ReferenceSystem):
    """The same with the best that a mediating driver can do: arrays, which Ray's store gives without a copy."""

    def move(self, num_rows: int, num_consumers: int, *, contiguous: bool) -> int:
        shards = ray.get([producer.produce.remote(num_rows) for producer in self._actors.producers])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            batch = torch.cat([torch.from_numpy(shard) for shard in shards])
        parts = [ray.put(part.numpy()) for part in batch.tensor_split(num_consumers)]
        read = [self._actors.consumers[rank].read.remote(contiguous, part) for rank, part in enumerate(parts)]
        return sum(ray.get(read))
