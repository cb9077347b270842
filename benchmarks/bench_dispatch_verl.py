"""A batch from four producers to four consumers, here and in verl 0.9.1, in turns in one run, with default settings.

In verl a batch goes to the driver and from there to the consumers, packed by `torch.save`, or by numpy where
`VERL_DATAPROTO_SERIALIZATION_METHOD` says so; both are measured. Here it goes from worker to worker. Each has its own
Ray cluster with the object store that it chooses by itself, its own processes, and the same rows, every one of which
is summed. Times run from the producers' call until the driver has the sums; verl runs in an environment of its own,
made from the package registry. verl's modes are measured one after another, each in turns with the controller. Exits
with 1 if verl's faster mode is not slower by the wanted factor.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conformance_verl import INSTALLS
from dispatch_systems import NUM_PRODUCERS, ROW_ITEMS, ControllerSystem, expected_sum
from measurement import record
from peer_environments import ROOT, make_environment

from hf_controller import RayExecutor

SIZES_MB = (128, 512)
WARM_UP_ROUNDS = 3
ROUNDS = 9
SETTLE_S = 0.2
"""Between two measurements: Ray frees the last one's objects in the background."""
MIN_RATIO = 3.0
MODES = {"verl": "", "verl_numpy": "numpy"}


class Peer:
    """verl's program in one mode of packing."""

    def __init__(self, python: Path, mode: str, log: Path) -> None:
        reading, writing = os.pipe()
        environment = os.environ | {"VERL_DATAPROTO_SERIALIZATION_METHOD": mode}
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [python, Path(__file__).with_name("dispatch_verl.py"), str(writing)],
                env=environment,
                pass_fds=[writing],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
            )
        os.close(writing)
        self._answers = os.fdopen(reading)
        self._log = log

    def move(self, num_rows: int) -> float:
        """Seconds of one move."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{num_rows}\n")
        self._process.stdin.flush()
        line = self._answers.readline()
        if not line:
            sys.exit(f"{self._log}: the process ended without an answer\n{self._log.read_text()[-3000:]}")
        return float(line)

    def close(self) -> None:
        """Waits until the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(120)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._answers.close()


def main() -> int:
    """Measure; 1 if the target is missed."""
    python = make_environment("verl", INSTALLS)
    found = {name: _compare(python, name, mode) for name, mode in MODES.items()}
    metrics: dict[str, tuple[float, str]] = {}
    missed = 0
    for size_mb in SIZES_MB:
        for name, sizes in found.items():
            for system, seconds in sizes[size_mb].items():
                key = f"{size_mb}mb_{system}" if system == name else f"{size_mb}mb_{system}_next_to_{name}"
                for kind, value in (
                    ("median", statistics.median(seconds)),
                    ("fastest", min(seconds)),
                    ("slowest", max(seconds)),
                ):
                    metrics[f"{key}_{kind}"] = (round(1000 * value, 1), "ms")
        faster = min(MODES, key=lambda name: statistics.median(found[name][size_mb][name]))
        times = found[faster][size_mb]
        ratio = statistics.median(times[faster]) / statistics.median(times["controller"])
        metrics[f"{size_mb}mb_ratio"] = (round(ratio, 2), "times the controller's, of verl's faster mode")
        missed += ratio < MIN_RATIO
        print(f"{'MISSED' if ratio < MIN_RATIO else 'reached'}  {size_mb} MB: {ratio:.2f} (wanted >= {MIN_RATIO})")
    record("dispatch_verl", metrics, versions={"verl": "0.9.1"})
    return int(bool(missed))


def _compare(python: Path, name: str, mode: str) -> dict[int, dict[str, list[float]]]:
    """Seconds of each size by system: the controller and one mode, because three clusters exhaust 24 GiB."""
    with _started(python, name, mode) as peer:
        peer.move(1)  # Ray finds a cluster by itself where one runs: the peer's program comes first
        with RayExecutor(num_cpus=2 * NUM_PRODUCERS + 2, log_to_driver=False) as executor:
            controller = ControllerSystem(executor)
            return {
                size_mb: _take_turns(controller, {name: peer}, size_mb * 2**20 // (NUM_PRODUCERS * ROW_ITEMS * 8))
                for size_mb in SIZES_MB
            }


@contextmanager
def _started(python: Path, name: str, mode: str) -> Iterator[Peer]:
    peer = Peer(python, mode, ROOT / ".cache" / f"dispatch-{name}.log")
    try:
        yield peer
    finally:
        peer.close()


def _take_turns(controller: ControllerSystem, peers: dict[str, Peer], num_rows: int) -> dict[str, list[float]]:
    """Seconds of every round after the first ones."""
    times: dict[str, list[float]] = {name: [] for name in ("controller", *peers)}
    names = list(times)
    for number in range(WARM_UP_ROUNDS + ROUNDS):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            time.sleep(SETTLE_S)
            if name == "controller":
                start_s = time.perf_counter()
                found = controller.move(num_rows, NUM_PRODUCERS, contiguous=True)
                seconds = time.perf_counter() - start_s
                assert found == expected_sum(num_rows), f"{found} was delivered"
            else:
                seconds = peers[name].move(num_rows)
            if number >= WARM_UP_ROUNDS:
                times[name].append(seconds)
    return times


if __name__ == "__main__":
    sys.exit(main())
