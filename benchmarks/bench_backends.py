"""The rollout backends against each other: the same model, the same prompts, the same random numbers.

Every backend runs in its own environment (`.venv`, `.venv-vllm`, `.venv-sglang`: set up with `scripts/env.sh`), one
rank with one thread; SGLang's own process is added. Measured are the start, from the start of the program to the
end of the first batch, everything that an engine compiles on the way included; samples a second of later batches; an
update of all weights, where the engine keeps its own; and the largest sum of resident memory over the processes.
Rates and updates are medians with the slowest and the fastest of the rounds. There is no target.

Figures of a machine that does something else are worth nothing: the load before the start is part of the result.
`--write` puts the table into `docs/how-to/swap-inference-backend.md`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "how-to" / "swap-inference-backend.md"
NUM_ROUNDS = 7
CACHE_BYTES = 256 << 20
DEADLINE_S = 600.0


def main() -> int:
    """Measure every backend whose environment is there; 1 if one fails."""
    if sys.argv[1:] not in ([], ["--write"]):
        backend, directory = sys.argv[1:]
        print(json.dumps(measure(backend, directory)))
        return 0
    from engine_programs import ENVIRONMENTS, read_engine_versions
    from generation_workload import write_model
    from measurement import record, write_table

    metrics: dict[str, tuple[float, str]] = {"load_before": (round(os.getloadavg()[0], 2), "processes")}
    measured, failed = [], []
    with tempfile.TemporaryDirectory() as directory:
        write_model(directory)
        for backend, environment in ENVIRONMENTS.items():
            python = ROOT / environment / "bin" / "python"
            if not python.exists():
                print(f"{backend} is left out: {environment} is not there, scripts/env.sh sets it up", file=sys.stderr)
                continue
            found = _run(python, backend, directory)
            metrics |= {f"{backend}_{name}": value for name, value in found.items()}
            (measured if found else failed).append(backend)
    record("backends", metrics, versions=read_engine_versions())
    table = _table(metrics, measured)
    print(table)
    if sys.argv[1:] and not failed:
        write_table(PAGE, "bench_backends", table)
    return 1 if failed else 0


def measure(backend: str, directory: str) -> dict[str, Any]:
    """In the backend's environment: seconds of every round, and when the first batch was there."""
    import torch
    import torch.distributed as dist
    from generation_workload import MAX_NEW_TOKENS, WORKLOADS, draw_prompts
    from tensordict import TensorDict

    from hf_engine import SamplingParams, load_rollout_backend
    from hf_engine.backends import SupportsShardLoading
    from hf_protocols import GenerationSpec, ParallelSpec, Topology

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    options = {} if backend == "transformers" else {"cache_bytes": CACHE_BYTES}
    rollout = load_rollout_backend(backend).build(
        directory, topology=Topology(ParallelSpec(), GenerationSpec()), **options
    )
    seconds: dict[str, list[float]] = {}
    ready = 0.0

    def timed(name: str, action: Callable[[], object]) -> None:
        start = time.perf_counter()
        action()
        seconds.setdefault(name, []).append(time.perf_counter() - start)

    def update(version: int) -> None:
        rollout.begin_weights()
        rollout.load_shards(weights)
        rollout.commit_weights(version)

    weights = _read_weights(directory)
    for number in range(NUM_ROUNDS + 1):
        if isinstance(rollout, SupportsShardLoading):
            timed("update", lambda version=number + 1: update(version))
        for workload, (num_prompts, n, longest) in WORKLOADS.items():
            rows = draw_prompts(num_prompts, longest, seed=number)
            columns = {
                "prompt_ids": torch.nested.nested_tensor(rows, layout=torch.jagged),
                "row_id": torch.arange(num_prompts),
            }
            batch = TensorDict(columns, batch_size=[num_prompts])
            sampling = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, n=n, step=number)
            timed(workload, lambda batch=batch, sampling=sampling: rollout.generate(batch, sampling))
            ready = ready or time.time()
    rollout.close()
    dist.destroy_process_group()
    return {"ready": ready, "seconds": {name: times[1:] for name, times in seconds.items()}}


def _read_weights(directory: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: [tensor] for name, tensor in load_file(Path(directory) / "model.safetensors").items()}


def _run(python: Path, backend: str, directory: str) -> dict[str, tuple[float, str]]:
    """One backend's metrics; none, and why on stderr, where it failed."""
    from engine_programs import watch_memory

    begun = time.time()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [str(python), __file__, backend, directory], stdout=output, stderr=errors, start_new_session=True
        )
        peak = watch_memory(process, deadline_s=DEADLINE_S)
        output.seek(0)
        errors.seek(0)
        if process.returncode:
            print(f"{backend} ended with {process.returncode}\n{errors.read()}", file=sys.stderr)
            return {}
        found = json.loads(output.read().splitlines()[-1])
    metrics = {"start": (round(found["ready"] - begun, 1), "s"), "peak_memory": (round(peak / 1e9, 2), "GB")}
    for name, seconds in found["seconds"].items():
        metrics |= _spread(name, seconds)
    return metrics


def _spread(name: str, seconds: list[float]) -> dict[str, tuple[float, str]]:
    from generation_workload import WORKLOADS

    if name == "update":
        values, unit = [1000 * each for each in seconds], "ms"
    else:
        num_prompts, n, _ = WORKLOADS[name]
        values, unit = [num_prompts * n / each for each in seconds], "samples/s"
    kinds = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {f"{name}_{kind}": (round(value, 1), unit) for kind, value in kinds.items()}


def _table(metrics: dict[str, tuple[float, str]], backends: list[str]) -> str:
    """The page's table, in Markdown."""
    from generation_workload import WORKLOADS

    def cell(name: str) -> str:
        if f"{name}_median" not in metrics:
            return "-"
        median, low, high = (metrics[f"{name}_{kind}"][0] for kind in ("median", "min", "max"))
        return f"{median:g} ({low:g} to {high:g})"

    columns = [*(f"samples/s, {name.replace('_', ' ')}" for name in WORKLOADS), "update of all weights, ms"]
    lines = [["backend", *columns, "start, s", "peak memory, GB"], ["---"] * (len(columns) + 3)]
    for backend in backends:
        cells = [cell(f"{backend}_{name}") for name in (*WORKLOADS, "update")]
        rest = [f"{metrics[f'{backend}_{name}'][0]:g}" for name in ("start", "peak_memory")]
        lines.append([f"`{backend}`", *cells, *rest])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
