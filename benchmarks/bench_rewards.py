"""Cost of calling reward functions in a pool of processes, against calling them in a loop.

A thousand responses of a thousand characters are scored by functions that take no time, one or five milliseconds a
response. The pool and the plain loop take turns in one run; figures are medians of rounds. Slow functions sleep most of
their time, so that a busy machine delays both sides alike; with P processes the least that the pool can take is the
loop's time over P.

Exits with 1 if a target is missed: 20 ms more than the loop for quick functions, 1.2 times the loop's share for slow
ones.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

from measurement import record

from hf_algorithms.rewards import FunctionSpec, Samples, ScoringFunctions

NUM_RESPONSES = 1000
SAMPLES_PER_PROMPT = 8
NUM_PROCESSES = 2
MAX_QUICK_MORE_S = 0.020
MAX_SLOW_RATIO = 1.2


def quick_group(responses: list[str], answers: list[str]) -> list[float]:
    """Scores all responses to a prompt."""
    return [float(response == answer) for response, answer in zip(responses, answers, strict=True)]


def quick_sample(solution_str: str, ground_truth: str) -> float:
    """Scores one response."""
    return float(solution_str == ground_truth)


def sample_of_1_ms(solution_str: str, ground_truth: str) -> float:
    """Scores one response, slowly."""
    time.sleep(0.001)
    return float(solution_str == ground_truth)


def sample_of_5_ms(solution_str: str, ground_truth: str) -> float:
    """Scores one response, more slowly."""
    time.sleep(0.005)
    return float(solution_str == ground_truth)


def group_of_8_ms(responses: list[str], answers: list[str]) -> list[float]:
    """Scores all responses to a prompt, one millisecond each."""
    time.sleep(0.001 * len(responses))
    return quick_group(responses, answers)


PER_SAMPLE: tuple[Callable[[str, str], float], ...] = (quick_sample, sample_of_1_ms, sample_of_5_ms)
PER_GROUP: tuple[Callable[[list[str], list[str]], list[float]], ...] = (quick_group, group_of_8_ms)
ROUNDS = {"quick_sample": 41, "quick_group": 41, "sample_of_1_ms": 7, "sample_of_5_ms": 3, "group_of_8_ms": 7}


def main() -> int:
    """Measure, print each target and whether it was reached, and keep the result."""
    texts = [f"{number:01000d}" for number in range(NUM_RESPONSES)]
    samples = Samples(
        prompts=["Why?" * 50] * NUM_RESPONSES,
        responses=texts,
        answers=texts,
        groups=[number // SAMPLES_PER_PROMPT for number in range(NUM_RESPONSES)],
    )
    functions = [*PER_SAMPLE, *PER_GROUP]
    specs = [FunctionSpec(name=each.__name__, function=each) for each in functions]
    scoring = ScoringFunctions(specs, num_processes=NUM_PROCESSES)
    metrics: dict[str, tuple[float, str]] = {}
    missed = 0
    for number, function in enumerate(functions):
        name = function.__name__
        loop_s, pool_s = _take_turns(scoring, number, samples, ROUNDS[name])
        metrics |= {f"{name}_loop": (loop_s, "s"), f"{name}_pool": (pool_s, "s")}
        if name.startswith("quick"):
            value, bound, unit = pool_s - loop_s, MAX_QUICK_MORE_S, "s more than the loop"
        else:
            value, bound, unit = pool_s / (loop_s / NUM_PROCESSES), MAX_SLOW_RATIO, "times the loop's share"
        missed += value > bound
        print(f"{'ok    ' if value <= bound else 'MISSED'}  {name}: {value:.4f} {unit} <= {bound}", flush=True)
    scoring.close()
    record("rewards", metrics)
    return 1 if missed else 0


def _take_turns(scoring: ScoringFunctions, number: int, samples: Samples, rounds: int) -> tuple[float, float]:
    function = [*PER_SAMPLE, *PER_GROUP][number]
    scoring.score(samples, [number])  # each process has loaded it, and the time of a call is known
    loop, pool = [], []
    for _ in range(rounds):
        start_s = time.perf_counter()
        if number < len(PER_SAMPLE):
            wanted = [function(*each) for each in zip(samples.responses, samples.answers, strict=True)]  # type: ignore[arg-type]
        else:
            step = range(0, NUM_RESPONSES, SAMPLES_PER_PROMPT)
            parts = [slice(start, start + SAMPLES_PER_PROMPT) for start in step]
            wanted = [
                score
                for part in parts
                for score in function(list(samples.responses[part]), list(samples.answers[part]))  # type: ignore[arg-type, union-attr]
            ]
        loop.append(time.perf_counter() - start_s)
        start_s = time.perf_counter()
        (found,) = scoring.score(samples, [number])
        pool.append(time.perf_counter() - start_s)
        assert found.scores == wanted
    return statistics.median(loop), statistics.median(pool)


if __name__ == "__main__":
    sys.exit(main())
