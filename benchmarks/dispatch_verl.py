"""verl's side of `bench_dispatch_verl.py`; runs in an environment of its own and imports nothing of ours.

It reads the rows that each producer returns from standard input, one number a line, and answers on the descriptor
that it is given with the seconds of one move.
"""

from __future__ import annotations

import os
import sys
import time

import ray
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

NUM_WORKERS = 4
ROW_ITEMS = 512
"""int64 numbers in a row: 4 KiB."""


class Producer(Worker):  # type: ignore[misc]
    """Returns rows that it has made before."""

    def __init__(self) -> None:
        super().__init__()
        self._rows = torch.empty(0, ROW_ITEMS, dtype=torch.int64)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)  # type: ignore[untyped-decorator]
    def produce(self, batch: DataProto) -> DataProto:
        num_rows = int(batch.batch["num_rows"][0])
        if num_rows != len(self._rows):
            self._rows = torch.arange(ROW_ITEMS).repeat(num_rows, 1)
        return DataProto(batch=TensorDict({"rows": self._rows}, batch_size=[num_rows]))


class Consumer(Worker):  # type: ignore[misc]
    """Sums all numbers of its rows."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)  # type: ignore[untyped-decorator]
    def read(self, batch: DataProto) -> int:
        return int(batch.batch["rows"].sum())


def main() -> None:
    """Move batches until standard input ends."""
    answers = os.fdopen(int(sys.argv[1]), "w")
    ray.init(num_cpus=2 * NUM_WORKERS + 2, include_dashboard=False, log_to_driver=False)
    producers, consumers = _build_group(Producer), _build_group(Consumer)
    for line in sys.stdin:
        num_rows = int(line)
        wanted = DataProto(
            batch=TensorDict({"num_rows": torch.full((NUM_WORKERS,), num_rows)}, batch_size=[NUM_WORKERS])
        )
        start_s = time.perf_counter()
        found = sum(consumers.read(producers.produce(wanted)))
        seconds = time.perf_counter() - start_s
        assert found == NUM_WORKERS * num_rows * (ROW_ITEMS * (ROW_ITEMS - 1) // 2), f"{found} was delivered"
        answers.write(f"{seconds}\n")
        answers.flush()
    ray.shutdown()


def _build_group(worker: type) -> RayWorkerGroup:
    pool = RayResourcePool([NUM_WORKERS], use_gpu=False, max_colocate_count=1)
    actor = RayClassWithInitArgs(ray.remote(worker))
    return RayWorkerGroup(pool, actor, device_name="cpu")


if __name__ == "__main__":
    main()
