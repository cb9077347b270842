"""Cost of importing each package in a fresh interpreter: every worker process pays it once.

Packages and torch take turns, round by round. Target: hf_engine, which imports torch, takes below 1.5 x its time.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

from measurement import record

MODULES = ("torch", "hf_protocols", "hf_mapper", "hf_engine", "hf_controller", "hf_algorithms")
NUM_ROUNDS = 5
MAX_ENGINE_OVER_TORCH = 1.5
PROGRAM = "import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"


def main() -> int:
    """Measure all modules, medians because the first run reads from disk; 1 if the target is missed."""
    runs: dict[str, list[float]] = {module: [] for module in MODULES}
    for _ in range(NUM_ROUNDS):
        for module in MODULES:
            runs[module].append(_import_s(module))
    seconds = {module: statistics.median(found) for module, found in runs.items()}
    metrics = {f"{module}_import_s": (round(median, 4), "s") for module, median in seconds.items()}
    ratio = seconds["hf_engine"] / seconds["torch"]
    metrics["hf_engine_over_torch"] = (round(ratio, 3), "times `import torch`")
    record("import", metrics)
    reached = ratio < MAX_ENGINE_OVER_TORCH
    print(f"{'reached' if reached else 'MISSED '} hf_engine / torch: {ratio:.2f} (wanted < {MAX_ENGINE_OVER_TORCH})")
    return 0 if reached else 1


def _import_s(module: str) -> float:
    command = [sys.executable, "-c", PROGRAM.format(module=module)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    sys.exit(main())
