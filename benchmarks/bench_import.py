"""What `import` of each package costs in a fresh interpreter: every worker process pays it once."""

from __future__ import annotations

import statistics
import subprocess
import sys

from measurement import record

PACKAGES = ("hf_protocols", "hf_mapper", "hf_engine", "hf_controller", "hf_algorithms")
REPEATS = 3
PROGRAM = "import time; start = time.perf_counter(); import {package}; print(time.perf_counter() - start)"


def main() -> None:
    """Measure all packages; the median of a few runs, because the first one reads from disk."""
    record("import", {f"{package}_import_s": (_import_s(package), "s") for package in PACKAGES})


def _import_s(package: str) -> float:
    command = [sys.executable, "-c", PROGRAM.format(package=package)]
    runs = [float(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(REPEATS)]
    return round(statistics.median(runs), 4)


if __name__ == "__main__":
    main()
