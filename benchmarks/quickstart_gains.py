"""The quickstart with every rollout backend, from the same configuration and seed, with a dated result.

Each runs with the `hybridflow` of its environment (`.venv`, `.venv-vllm`, `.venv-sglang`; `scripts/env.sh` makes them).
Recorded are the exact match on held-out rows before and after the training, and the memory of all processes. A gain
of 20 points is wanted. Exits with 1 where one is smaller, a run fails, or an environment is missing.

`--write` puts the table into `docs/how-to/swap-inference-backend.md`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from engine_programs import ENVIRONMENTS, read_engine_versions, watch_memory
from measurement import record, write_table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "how-to" / "swap-inference-backend.md"
WANTED_POINTS = 20.0
DEADLINE_S = 2400.0


def main() -> int:
    """Run all three; 1 if one gains too little or does not end well."""
    metrics: dict[str, tuple[float, str]] = {}
    for backend, environment in ENVIRONMENTS.items():
        program = ROOT / environment / "bin" / "hybridflow"
        if not program.exists():
            sys.exit(f"{environment} is not there. Set it up with scripts/env.sh {environment.removeprefix('.venv-')}")
        metrics |= {f"{backend}_{name}": value for name, value in _run(program, backend).items()}
    record("quickstart", metrics, versions=read_engine_versions())
    table = _table(metrics)
    print(table)
    if sys.argv[1:] == ["--write"]:
        write_table(PAGE, "quickstart_gains", table)
    return int(any(metrics[f"{backend}_gain"][0] < WANTED_POINTS for backend in ENVIRONMENTS))


def _run(program: Path, backend: str) -> dict[str, tuple[float, str]]:
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder) / "run", Path(folder) / "log"
        command = [str(program), "quickstart", "--rollout", backend, "--output", str(output)]
        with log.open("w") as lines:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=lines, stderr=lines)
            peak = watch_memory(process, deadline_s=DEADLINE_S)
        if process.returncode:
            sys.exit(f"{' '.join(command)} ended with {process.returncode}\n{log.read_text()[-4000:]}")
        summary = json.loads((output / "summary.json").read_text())
    before, after = (100 * summary[f"score_{when}"] for when in ("before", "after"))
    return {
        "before": (round(before, 1), "%"),
        "after": (round(after, 1), "%"),
        "gain": (round(after - before, 1), "points"),
        "peak_memory": (round(peak / 1e9, 1), "GB"),
    }


def _table(metrics: dict[str, tuple[float, str]]) -> str:
    """The page's table, in Markdown."""
    lines = ["| backend | exact match before and after | gain, points | peak memory, GB |", "| --- | --- | --- | --- |"]
    for backend in ENVIRONMENTS:
        before, after, gain, memory = (
            metrics[f"{backend}_{name}"][0] for name in ("before", "after", "gain", "peak_memory")
        )
        lines.append(f"| `{backend}` | {before:g} % -> {after:g} % | {gain:g} | {memory:g} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
