"""Search for a correction by layout that finds the best of vTrain's multi-machine sweeps; see simulator-errors.md.

Each prediction is multiplied by 1 + a log2(8 / tp) + b log2(pp) + c log2(micro-batch), for many drawn (a, b, c), some
of which slow down small tensor groups, deep pipelines or large micro-batches and some of which favour them. Prints how
many of these factors bring the mean regret down to two percent. A few seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from simulator_errors import MEASURED, OTHER_SWEEP, load_cases

from hf_mapper.measurements.cases import TrainingCase

NUM_FACTORS = 200_000
LARGEST = 0.15
WANTED = 0.02


def main() -> int:
    """Draw the factors and print what they reach."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else MEASURED
    cases = [case for case in load_cases(folder) if isinstance(case, TrainingCase) and "vTrain" in case.source]
    sweeps = [[case for case in cases if case.fit_group == name] for name in OTHER_SWEEP]
    chance = np.random.default_rng(0)
    factors = np.vstack([np.zeros(3), chance.uniform(-LARGEST, LARGEST, (NUM_FACTORS, 3))])
    regrets = np.mean([find_regrets(sweep, factors) for sweep in sweeps], axis=0)
    print(f"as shipped: mean regret {100 * regrets[0]:.1f} %")
    print(f"best of {NUM_FACTORS:,} factors: {100 * regrets[1:].min():.1f} %")
    print(f"at most {100 * WANTED:.0f} %: {np.count_nonzero(regrets[1:] <= WANTED):,} of them")
    return 0


def find_regrets(sweep: Sequence[TrainingCase], factors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the cost of the predicted best over the measured best, under each of F factors `[F, 3]`: `[F]`."""
    measured = np.array([case.measured for case in sweep])
    predicted = np.array([case.predict() for case in sweep])
    features = np.log2([describe(case) for case in sweep])
    chosen = (predicted * (1 + factors @ features.T)).argmin(axis=1)
    return measured[chosen] / measured.min() - 1


def describe(case: TrainingCase) -> tuple[float, float, float]:
    """Returns a case's tensor groups per machine, stages, and sequences in a micro-batch."""
    sequences = case.workload.micro_batch_tokens / case.workload.sequence_tokens
    return max(1.0, 8 / case.parallel.tp_size), float(case.parallel.pp_size), sequences


if __name__ == "__main__":
    sys.exit(main())
