"""Metrics of several calls, brought together."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict

from hf_controller import InProcessExecutor, MetricsFuture, ResourcePool, TracingExecutor, Worker, WorkerSpec
from hf_protocols import DP, ParallelSpec, Topology, merge_metrics, register


class Measuring(Worker):
    needs_process_group = False

    @register(protocol=DP, returns="metrics", reads=("value",))
    def measure(self, batch: TensorDict) -> dict[str, tuple[float, float]]:
        values = batch["value"]
        return {"mean": (float(values.sum()), len(values)), "value_max": (float(values.max()), 1.0), "none": (0.0, 0.0)}


def measure(values: list[float], rows: list[int], *, dp_size: int) -> MetricsFuture:
    with InProcessExecutor() as executor:
        spec = WorkerSpec(worker=Measuring, topology=Topology(ParallelSpec(dp_size=dp_size)))
        group = executor.build_groups(ResourcePool([dp_size], device="cpu"), {"measuring": spec})["measuring"]
        batch = executor.put(TensorDict({"value": torch.tensor(values)}, batch_size=[len(values)]))
        found = group.measure(batch.rows(rows))
        found.wait()
        return found


@pytest.mark.parametrize("dp_size", [1, 2])
def test_sums_of_calls_merge_to_the_mean_of_all_rows(dp_size: int) -> None:
    values = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
    parts = [measure(values, rows, dp_size=dp_size) for rows in ([0, 1, 2, 3, 4], [5, 6])]
    merged = merge_metrics(part.sums() for part in parts)
    assert merged == {"mean": (sum(values), 7.0), "value_max": (64.0, 1.0), "none": (0.0, 0.0)}
    first, second = (part.result() for part in parts)
    assert first["mean"] == 31 / 5
    assert second["mean"] == 48.0
    assert math.isnan(first["none"])


def test_sums_of_a_traced_call_divide_to_zero() -> None:
    executor = TracingExecutor()
    found = executor.build_group("measuring", Measuring).measure(executor.put_columns(["value"], 4)).sums()
    value, count = (found | {"own": (1.0, 2.0)})["any"]
    assert value / count == 0.0
