"""Cost of moving a batch from four producers to four or two consumers, against two other ways.

A producer returns rows that it holds; a consumer reads every byte of what it gets, once as one contiguous batch and
once as a list of zero-copy pieces. The systems in `dispatch_systems`:

* controller: a future from one worker group to another;
* reference, the floor: bare Ray references between actors;
* mediated, the baseline: workers return tensors, the driver gets, concatenates, splits and puts them;
* mediated_arrays: the same with numpy arrays, which no worker returns and which Ray's store gives without a copy: the
  least that a mediating driver can cost. How much faster than it the controller and the reference are is printed.

A time runs from the producers' call until the driver has the consumers' sums. The four take turns, each round
beginning with another, in one run on one cluster; figures are medians with quartiles. Every sum is checked. Sizes are
those of the whole batch. An empty call has no rows, no arguments and no result, on four consumers; four rows of no
bytes through producers and consumers (0 MB) are reported next to it, without a target.

The controller's payload is counted in its process, where Ray packs and unpacks (`payload`): calls, reports and
row metadata together, per call of a method on a group. What a row adds is the difference between a call that reads
permuted rows and one that reads them in order.

Exits with 1 if a target is missed.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from dispatch_systems import (
    NUM_PRODUCERS,
    ROW_ITEMS,
    ControllerSystem,
    DispatchSystem,
    MediatedArraysSystem,
    MediatedSystem,
    PlainActors,
    ReferenceSystem,
    expected_sum,
)
from measurement import record
from payload import count_payload

from hf_controller import RayExecutor

MIB = 2**20
ROUNDS = {0: 40, 1: 30, 16: 15, 128: 25, 512: 25}
"""By the batch's size in MB."""
WARM_UP_ROUNDS = 6
"""They fill caches, and let every process touch the shared memory that later rounds use again."""
CALL_ROUNDS = 200
STORE_BYTES = 4 * 2**30
SETTLE_S = 0.05
"""Between two measurements of large batches: Ray frees the last one's objects in the background."""

MEDIATED_EVERY = 5
"""The mediated system takes seconds for a large batch, so it takes part in every fifth round."""

LARGE_MB = 128
MIN_OVER_MEDIATED = 3.0
MAX_OVER_REFERENCE = 1.25
MAX_EMPTY_OVER_REFERENCE = 1.3
MAX_PAYLOAD_BYTES = 64 * 1024
MAX_ROW_BYTES = 8

Times = Mapping[str, list[float]]


def main() -> int:
    """Measure, print each target and whether it was reached, and keep the result."""
    targets: list[tuple[str, float, str, float]] = []
    metrics: dict[str, tuple[float, str]] = {}
    # Plain actors: workers of the executor's cluster import nothing from the folder of a program by themselves.
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    with RayExecutor(num_cpus=NUM_PRODUCERS + 6, object_store_bytes=STORE_BYTES, log_to_driver=False) as executor:
        controller = ControllerSystem(executor)
        # Processes of their own for each: a process is faster in shared memory that it has touched before.
        systems: dict[str, DispatchSystem] = {
            "controller": controller,
            "reference": ReferenceSystem(PlainActors()),
            "mediated": MediatedSystem(PlainActors()),
            "mediated_arrays": MediatedArraysSystem(PlainActors()),
        }
        times = _take_turns(systems, lambda system: system.call(), CALL_ROUNDS, 0.0)
        metrics |= _describe("empty_call", times)
        ratio = _ratio(times, "controller", "reference")
        targets.append(("empty call / reference", ratio, "<=", MAX_EMPTY_OVER_REFERENCE))
        for size_mb, rounds in ROUNDS.items():
            for num_consumers in (4, 2):
                for form in ("contiguous", "pieces"):
                    name = f"{size_mb}mb_to{num_consumers}_{form}"
                    times = _take_turns(systems, _mover(size_mb, num_consumers, form), rounds, SETTLE_S * (size_mb > 1))
                    metrics |= _describe(name, times)
                    if size_mb >= LARGE_MB:
                        targets += _large_targets(name, times)
            payload = _payload_bytes(controller, _num_rows(size_mb))
            metrics[f"{size_mb}mb_payload_per_call_bytes"] = (payload, "bytes")
            targets.append((f"{size_mb}mb payload per call, bytes", payload, "<", MAX_PAYLOAD_BYTES))
        row_bytes = _row_bytes(controller)
        metrics["row_metadata_bytes_per_row"] = (row_bytes, "bytes")
        targets.append(("row metadata, bytes per permuted row", row_bytes, "<=", MAX_ROW_BYTES))
    record("dispatch", metrics)
    return _judge(targets)


def _large_targets(name: str, times: Times) -> list[tuple[str, float, str, float]]:
    # No target: where the floor itself is not three times faster, nothing that respects the floor can be.
    faster = {system: _ratio(times, "mediated_arrays", system) for system in ("controller", "reference")}
    print(
        f"        {name}: faster than mediated arrays: controller {faster['controller']:.2f} x, reference "
        f"{faster['reference']:.2f} x",
        flush=True,
    )
    return [
        (f"{name}: mediated / controller", _ratio(times, "mediated", "controller"), ">=", MIN_OVER_MEDIATED),
        (f"{name}: controller / reference", _ratio(times, "controller", "reference"), "<=", MAX_OVER_REFERENCE),
    ]


def _num_rows(size_mb: int) -> int:
    """Rows of each producer."""
    return size_mb * MIB // (NUM_PRODUCERS * ROW_ITEMS * 8)


def _mover(size_mb: int, num_consumers: int, form: str) -> Callable[[DispatchSystem], None]:
    num_rows = _num_rows(size_mb)

    def move(system: DispatchSystem) -> None:
        found = system.move(num_rows, num_consumers, contiguous=form == "contiguous")
        assert found == expected_sum(num_rows), f"{type(system).__name__} delivered {found}"

    return move


def _take_turns(
    systems: Mapping[str, DispatchSystem], work: Callable[[DispatchSystem], None], rounds: int, settle_s: float
) -> dict[str, list[float]]:
    """Seconds of every round after the first few, which fill caches and touch new memory."""
    times: dict[str, list[float]] = {name: [] for name in systems}
    names = list(systems)
    for number in range(WARM_UP_ROUNDS + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if name == "mediated" and settle_s and number % MEDIATED_EVERY:
                continue
            time.sleep(settle_s)
            start_s = time.perf_counter()
            work(systems[name])
            if number >= WARM_UP_ROUNDS:
                times[name].append(time.perf_counter() - start_s)
    return times


def _ratio(times: Times, above: str, below: str) -> float:
    return statistics.median(times[above]) / statistics.median(times[below])


def _describe(name: str, times: Times) -> dict[str, tuple[float, str]]:
    """Median and quartiles of every system, and a line for the terminal."""
    metrics = {}
    for system, seconds in times.items():
        quartiles = statistics.quantiles(seconds, n=4)
        for kind, value in zip(("lower_quartile", "median", "upper_quartile"), quartiles, strict=True):
            metrics[f"{name}_{system}_{kind}_ms"] = (round(value * 1e3, 3), "ms")
    medians = ", ".join(f"{system} {statistics.median(each) * 1e3:.2f}" for system, each in times.items())
    print(f"{name}: {medians} ms", file=sys.stderr, flush=True)
    return metrics


def _payload_bytes(controller: ControllerSystem, num_rows: int) -> float:
    """The larger of the two calls' payloads."""
    payloads = []
    with count_payload() as payload:
        produced = controller.producers.produce(num_rows)
        produced.wait()
    payloads.append(payload.num_bytes)
    for group in controller.consumers.values():
        with count_payload() as payload:
            group.read(produced).result()
        payloads.append(payload.num_bytes)
    return max(payloads)


def _row_bytes(controller: ControllerSystem) -> float:
    """Returns the bytes that each row adds to the payload where rows are chosen one by one."""
    produced = controller.producers.produce(_num_rows(16))
    num_rows = produced.num_rows
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))
    payloads = []
    for batch in (produced, produced.rows(order)):
        with count_payload() as payload:
            controller.consumers[4].read(batch).result()
        payloads.append(payload.num_bytes)
    return round((payloads[1] - payloads[0]) / num_rows, 3)


def _judge(targets: list[tuple[str, float, str, float]]) -> int:
    compare: dict[str, Callable[[Any, Any], bool]] = {
        "<": lambda found, limit: found < limit,
        "<=": lambda found, limit: found <= limit,
        ">=": lambda found, limit: found >= limit,
    }
    missed = 0
    for name, found, sign, limit in targets:
        reached = compare[sign](found, limit)
        missed += not reached
        print(f"{'reached' if reached else 'MISSED ':8} {name:48} {found:10.2f} (wanted {sign} {limit})")
    print(f"{missed} of {len(targets)} targets missed" if missed else f"all {len(targets)} targets reached")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
