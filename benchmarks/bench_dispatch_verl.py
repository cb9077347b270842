"""A batch from four producers to four consumers, here and in verl 0.9.1, in turns in one run, with default settings.

In verl a batch goes to the driver and from there to the consumers, packed by `torch.save`, or by numpy where
`VERL_DATAPROTO_SERIALIZATION_METHOD` says so; both are measured. Here it goes from worker to worker. Each has its own
Ray cluster with the object store that it chooses by itself, its own processes, and the same rows, every one of which
is summed. Times run from the producers' call until the driver has the sums; verl runs in an environment of its own,
made from the package registry. verl's modes are measured one after another, each in turns with the controller. Exits
with 1 if verl's faster mode is not slower by the wanted factor.
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import closing
from pathlib import Path

from conformance_verl import INSTALLS
from dispatch_systems import NUM_PRODUCERS, ROW_ITEMS, ControllerSystem, expected_sum
from measured_program import MeasuredProgram
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
    program = str(Path(__file__).with_name("dispatch_verl.py"))
    log = ROOT / ".cache" / f"dispatch-{name}.log"
    variables = {"VERL_DATAPROTO_SERIALIZATION_METHOD": mode}
    with closing(MeasuredProgram(lambda answers: [str(python), program, str(answers)], log, variables)) as peer:
        peer.ask("1")  # Ray finds a cluster by itself where one runs: the peer's program comes first
        with RayExecutor(num_cpus=2 * NUM_PRODUCERS + 2, log_to_driver=False) as executor:
            controller = ControllerSystem(executor)
            found = {}
            for size_mb in SIZES_MB:
                ours, theirs = _take_turns(controller, peer, size_mb * 2**20 // (NUM_PRODUCERS * ROW_ITEMS * 8))
                found[size_mb] = {"controller": ours, name: theirs}
            return found


def _take_turns(controller: ControllerSystem, peer: MeasuredProgram, num_rows: int) -> tuple[list[float], list[float]]:
    """Seconds of the controller and of the peer in every round after the first ones."""
    ours: list[float] = []
    theirs: list[float] = []

    def move_here() -> None:
        start_s = time.perf_counter()
        found = controller.move(num_rows, NUM_PRODUCERS, contiguous=True)
        ours.append(time.perf_counter() - start_s)
        assert found == expected_sum(num_rows), f"{found} was delivered"

    turns = [move_here, lambda: theirs.append(float(peer.ask(str(num_rows))))]
    for number in range(WARM_UP_ROUNDS + ROUNDS):
        for turn in turns[number % 2 :] + turns[: number % 2]:
            time.sleep(SETTLE_S)
            turn()
    return ours[WARM_UP_ROUNDS:], theirs[WARM_UP_ROUNDS:]


if __name__ == "__main__":
    sys.exit(main())
