"""The simulators against the measured tables next to the repository: how long it takes and how far off they are.

Fails where an error is more than a tenth above the one that docs/reference/simulator-errors.md publishes. Without the
tables there is nothing to measure.
"""

from __future__ import annotations

import sys
import time

from measurement import record
from simulator_errors import MEASURED, build_error_rows, find_worse, load_cases, read_block


def main() -> int:
    """Measure, record, and compare with the page."""
    if not MEASURED.is_dir():
        print(f"{MEASURED} is absent: nothing to validate against")
        return 0
    start = time.perf_counter()
    rows = list(build_error_rows(load_cases(MEASURED)))
    seconds = time.perf_counter() - start
    metrics = {f"{source}, {phase}, {gpu}": (float(mape), "%") for source, phase, gpu, _, mape, *_ in rows}
    record("validate", {"validate_s": (round(seconds, 2), "s"), **metrics})
    worse = find_worse(read_block("errors"), rows)
    print("\n".join(worse))
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main())
