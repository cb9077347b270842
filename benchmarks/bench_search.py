"""Cost of a search, in seconds and memory: PPO on 128 GPUs one by one (wanted: at most 2 s) and on 1,024 (20 s),
Safe-RLHF on 1,024 by whole machines (10 s), PPO on two kinds of 64 GPUs (20 s); below 1 GB.

Each size is searched twice: for the paper's problem, equal models and 1,024 prompts, whose few divisors leave few
layouts; and for one that leaves many, different models and 5,040 prompts. Each case is a fresh process, imports
included in its memory and not in its time. Medians over several processes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from measurement import record

SIZES = {
    "ppo_128_gpus": ("ppo", {"a100-80": 128}, 2.0),
    "ppo_1024_gpus": ("ppo", {"a100-80": 1024}, 20.0),
    "safe_rlhf_1024_gpus": ("safe_rlhf_one_critic", {"a100-80": 1024}, 10.0),
    "ppo_two_kinds_of_64_gpus": ("ppo", {"a100-80": 64, "h100": 64}, 20.0),
}
DIFFERENT = ("llama-2-7b", "llama-2-13b", "codellama-34b", "llama-3-8b", "qwen2.5-7b")
PROBLEMS = {"equal": (("llama-2-7b",) * 5, 1024, 8), "different": (DIFFERENT, 5040, 1)}
MAX_BYTES = 1_000_000_000
NUM_RUNS = 3
PROGRAM = """
import json, resource, sys, time
from hf_mapper import ClusterSpec, MachineSpec, WorkloadSpec, gpu, map_dataflow
from hf_protocols import Dataflow, ModelShape
algorithm, counts, presets, prompts, updates = json.loads(sys.argv[1])
dataflow = Dataflow.preset(algorithm)
roles = [role for role in dataflow.roles if role != "advantage"]
models = {role: ModelShape.preset(preset) for role, preset in zip(roles, presets)}
machines = tuple(MachineSpec(gpu=gpu(kind), num_gpus=8, num_machines=n // 8) for kind, n in counts.items())
cluster = ClusterSpec(machines=machines, inter_bandwidth_bytes_per_s=25e9)
workload = WorkloadSpec(global_batch=prompts, prompt_tokens=1024, response_tokens=1024, mini_batches=updates)
start = time.perf_counter()
plan = map_dataflow(dataflow, models, cluster, workload)
seconds = time.perf_counter() - start
assert plan.estimates.search.complete
print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""


def main() -> int:
    """Measure every case; 1 if a target is missed."""
    metrics: dict[str, tuple[float, str]] = {}
    missed = 0
    for size, (algorithm, counts, limit_s) in SIZES.items():
        for problem, given in PROBLEMS.items():
            question = json.dumps([algorithm, counts, *given])
            command = [sys.executable, "-c", PROGRAM, question]
            runs = [
                json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(NUM_RUNS)
            ]
            seconds, peak_bytes = statistics.median(run[0] for run in runs), max(run[1] for run in runs)
            name = f"{size}_{problem}_models"
            metrics[f"{name}_s"] = (round(seconds, 3), "s")
            metrics[f"{name}_peak_bytes"] = (peak_bytes, "bytes")
            reached = seconds <= limit_s and peak_bytes < MAX_BYTES
            missed += not reached
            print(f"{'reached' if reached else 'MISSED'} {name}: {seconds:.2f} s, {peak_bytes / 1e6:.0f} MB")
    record("search", metrics)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
