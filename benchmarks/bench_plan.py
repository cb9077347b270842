"""Cost of planning a transition: Llama-2-70B on 128 ranks (wanted: below 2 s), Llama-3-405B on 1,024 ranks (wanted:
below 15 s and 2 GB).

Each case is a fresh process that plans every method which the layout defines, from the model's shape to every rank's
bytes, as `hf-engine plan` does. Medians over several processes, with
the fastest and the slowest; peak memory is the process's own, imports included.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from measurement import record

CASES = {
    "llama_2_70b_128_ranks": ("llama-2-70b", "4-8-4", "1-8", "megatron", 2.0),
    "llama_2_70b_fsdp_128_ranks": ("llama-2-70b", "1-1-128", "1-8", "fsdp", 2.0),
    "llama_3_405b_1024_ranks": ("llama-3-405b", "16-8-8", "1-8", "megatron", 15.0),
    "llama_3_405b_fsdp_1024_ranks": ("llama-3-405b", "1-1-1024", "1-8", "fsdp", 15.0),
}
MAX_BYTES = 2_000_000_000
NUM_RUNS = 5
PROGRAM = """
import json, resource, sys, time
from hf_engine import plan_transition
from hf_protocols import GenerationSpec, ModelShape, ParallelSpec, Topology
preset, train, generation, sharding = sys.argv[1:]
start = time.perf_counter()
topology = Topology(ParallelSpec.parse(train), GenerationSpec.parse(generation))
for method in ("hybridflow", "ds-chat") if sharding == "fsdp" else ("hybridflow", "hybridflow-v", "ds-chat"):
    planned = plan_transition(ModelShape.preset(preset), topology, method, sharding=sharding)
    assert sum(planned.recv_bytes.values()) == sum(planned.send_bytes.values())
    assert planned.exchanges and max(planned.peak_param_bytes.values()) >= planned.redundant_bytes
seconds = time.perf_counter() - start
print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""


def main() -> int:
    """Measure every case; 1 if a target is missed."""
    metrics: dict[str, tuple[float, str]] = {}
    missed = 0
    for name, (preset, train, generation, sharding, limit_s) in CASES.items():
        command = [sys.executable, "-c", PROGRAM, preset, train, generation, sharding]
        runs = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(NUM_RUNS)]
        seconds, peak_bytes = [run[0] for run in runs], max(run[1] for run in runs)
        median = statistics.median(seconds)
        for kind, value in (("median", median), ("fastest", min(seconds)), ("slowest", max(seconds))):
            metrics[f"{name}_{kind}_s"] = (round(value, 3), "s")
        metrics[f"{name}_peak_bytes"] = (peak_bytes, "bytes")
        reached = median < limit_s and peak_bytes < MAX_BYTES
        missed += not reached
        print(f"{'reached' if reached else 'MISSED'} {name}: {median:.2f} s, {peak_bytes / 1e6:.0f} MB")
    record("plan", metrics)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
