"""The time from `hybridflow train` to its first iteration, by phase, for a run in this process and one on Ray.

The command is a user's: a program of its own, the quickstart's settings without a warm start, and what a run evaluates
before it trains. The clock starts with the program and stops when the first iteration begins, which is the end of
`start_s` in the run's `summary.json`; what is not in its phases are imports. Runs take turns.

Bare Ray stands next to it: a program that imports torch, tensordict and transformers, starts Ray as the executor does,
and has one actor for each worker of the run. Two actors import what the ranks of a sharded model import. The third
one imports torch and tensordict, like the worker of the reward and of the advantages. No model is built.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measurement import record

from hf_algorithms.commands.quickstart import prepare_quickstart
from hf_algorithms.config import format_toml
from hf_algorithms.run.directory import RunDirectory

MOST_S = 10.0
NUM_ROUNDS = 5
EXECUTORS = ("in_process", "ray")
BARE_RAY = """
import time

import ray, tensordict, torch
from transformers.models.llama import modeling_llama

ray.init(
    address="local",
    num_cpus=3,
    object_store_memory=256 << 20,
    log_to_driver=False,
    include_dashboard=False,
    _system_config={"prestart_worker_first_driver": False, "enable_worker_prestart": False},
)


@ray.remote
class Process:
    def load(self, is_rank):
        import tensordict, torch

        if is_rank:
            import torch._dynamo  # the first sharded module imports it
            import torch.distributed.fsdp
            from transformers.models.llama import modeling_llama


# Two ranks of the models, and a process for the reward function and the advantages.
ray.get([Process.remote().load.remote(is_rank) for is_rank in (True, True, False)])
print(time.time())
ray.shutdown()
"""


def main() -> int:
    """Measure; 1 if a start takes longer than wanted."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in (*EXECUTORS, "bare_ray")}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(NUM_ROUNDS):
            for executor in EXECUTORS:
                phases = _start(Path(folder) / f"{executor}-{number}", executor)
                print(executor, {name: round(value, 2) for name, value in phases.items()}, flush=True)
                found[executor].append(phases)
            found["bare_ray"].append({"whole": _start_bare()})
            print("bare_ray", found["bare_ray"][-1], flush=True)
    metrics: dict[str, tuple[float, str]] = {}
    missed = []
    for executor, rounds in found.items():
        for name in rounds[0]:
            values = [each[name] for each in rounds]
            metrics[f"{executor}_{name.replace(' ', '_')}"] = (round(statistics.median(values), 2), "s")
        wholes = [each["whole"] for each in rounds]
        metrics |= {
            f"{executor}_fastest": (round(min(wholes), 2), "s"),
            f"{executor}_slowest": (round(max(wholes), 2), "s"),
        }
        if executor in EXECUTORS and metrics[f"{executor}_whole"][0] > MOST_S:
            missed.append(executor)
    record("start", metrics)
    for executor in EXECUTORS:
        word = "MISSED" if executor in missed else "reached"
        print(f"{word}  {executor}: {metrics[f'{executor}_whole'][0]} s (wanted <= {MOST_S})")
    print(f"bare Ray with the same libraries: {metrics['bare_ray_whole'][0]} s")
    return int(bool(missed))


def _start(folder: Path, executor: str) -> dict[str, float]:
    """Seconds of each phase, of imports, and of the whole start."""
    config = prepare_quickstart(RunDirectory(folder / "source"), iterations=1, ranks=2 if executor == "ray" else 1)
    path = folder / "config.toml"
    path.write_text(format_toml(config))
    settings = {"run.output_dir": str(folder / "run"), "run.eval_every": 1, "warm_start.max_steps": 0}
    flags = [flag for key, value in settings.items() for flag in ("--set", f"{key}={value}")]
    command = [Path(sys.executable).with_name("hybridflow"), "train", path, *flags]
    begun_s = time.time()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    summary = folder / "run" / "summary.json"
    body = json.loads(summary.read_text())
    phases: dict[str, float] = body["start_s"]
    # A run counts its wall time from the moment at which its checks begin, and writes it last.
    imports_s = summary.stat().st_mtime - begun_s - body["wall_s"]
    return {"imports": imports_s, **phases, "whole": imports_s + sum(phases.values())}


def _start_bare() -> float:
    """Seconds until bare actors have the libraries of a run."""
    begun_s = time.time()
    environment = os.environ | {
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_client_connect_timeout_milliseconds": "20",
        "RAY_raylet_client_num_connect_attempts": "500",
    }
    command = [sys.executable, "-c", BARE_RAY]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return float(ended.stdout) - begun_s


if __name__ == "__main__":
    sys.exit(main())
