"""The time from `hybridflow train` to its first iteration, by phase, for a run in this process and one on Ray.

The command is a user's: a program of its own, the quickstart's settings without a warm start, and what a run evaluates
before it trains. The clock starts with the program and stops when the first iteration begins, which is the end of
`start_s` in the run's `summary.json`; what is not in its phases are imports. Runs take turns.

Bare Ray stands next to it: a program that imports torch, tensordict and transformers, starts Ray as the executor does,
with its settings that shorten the start, and has one actor for each worker of the run. Two actors import what the ranks
of a sharded model import. The third one imports torch and tensordict, like the worker of the reward and of the
advantages. No model is built.

Further runs of both on Ray have their CPU time counted until then: of the program, of the workers, and of all other
processes, which are Ray's and the executor's watchdog. The same work takes at least their sum divided by the cores.
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
from threading import Event, Thread

import psutil
from measurement import record

from hf_algorithms.commands.quickstart import prepare_quickstart
from hf_algorithms.config import format_toml
from hf_algorithms.run_directory import RunDirectory
from hf_protocols import read_machine_limits

MOST_S = 10.0
NUM_ROUNDS, NUM_PROFILES = 5, 3
EXECUTORS = ("in_process", "ray")
SAMPLE_S = 0.1
KINDS = ("program", "workers", "ray")
NUM_WORKERS = 3
MOST_LATE_S = 0.5
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
        cpu = _measure_cpu(Path(folder))
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
    record("start", metrics | {name: (round(value, 2), "s") for name, value in cpu.items()})
    for executor in EXECUTORS:
        word = "MISSED" if executor in missed else "reached"
        print(f"{word}  {executor}: {metrics[f'{executor}_whole'][0]} s (wanted <= {MOST_S})")
    print(f"bare Ray with the same libraries: {metrics['bare_ray_whole'][0]} s")
    for name in ("ray", "bare_ray"):
        parts = ", ".join(f"{kind} {cpu[f'{name}_cpu_{kind}']:.1f}" for kind in KINDS)
        print(f"{name}: CPU seconds: {parts}; if no core ever waited: {cpu[f'{name}_cpu_bound']:.1f} s")
    return int(bool(missed))


def _start(folder: Path, executor: str) -> dict[str, float]:
    """Seconds of each phase, of imports, and of the whole start."""
    command = _command(folder, executor)
    begun_s = time.time()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return _read_phases(folder, begun_s)


def _command(folder: Path, executor: str) -> list[str | Path]:
    config = prepare_quickstart(RunDirectory(folder / "source"), iterations=1, ranks=2 if executor == "ray" else 1)
    path = folder / "config.toml"
    path.write_text(format_toml(config))
    settings = {"run.output_dir": str(folder / "run"), "run.eval_every": 1, "warm_start.max_steps": 0}
    flags = [flag for key, value in settings.items() for flag in ("--set", f"{key}={value}")]
    return [Path(sys.executable).with_name("hybridflow"), "train", path, *flags]


def _read_phases(folder: Path, begun_s: float) -> dict[str, float]:
    summary = folder / "run" / "summary.json"
    body = json.loads(summary.read_text())
    phases: dict[str, float] = body["start_s"]
    # A run counts its wall time from the moment at which its checks begin, and writes it last.
    imports_s = summary.stat().st_mtime - begun_s - body["wall_s"]
    return {"imports": imports_s, **phases, "whole": imports_s + sum(phases.values())}


def _start_bare() -> float:
    """Seconds until bare actors have the libraries of a run."""
    begun_s = time.time()
    ended = subprocess.run(**_bare_command(), check=True)
    return float(ended.stdout) - begun_s


def _bare_command() -> dict[str, object]:
    environment = os.environ | {
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_client_connect_timeout_milliseconds": "20",
        "RAY_raylet_client_num_connect_attempts": "500",
    }
    return {"args": [sys.executable, "-c", BARE_RAY], "stdout": subprocess.PIPE, "text": True, "env": environment}


def _measure_cpu(folder: Path) -> dict[str, float]:
    """CPU seconds until the first iteration, or until bare actors have the libraries: medians, and their bounds."""
    rounds: dict[str, list[dict[str, float]]] = {"ray": [], "bare_ray": []}
    for number in range(NUM_PROFILES):
        run = folder / f"profile-{number}"
        command, begun_s = _command(run, "ray"), time.time()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as program, CpuMeter(program.pid) as meter:
            _require_success(program)
        rounds["ray"].append(meter.read(begun_s + _read_phases(run, begun_s)["whole"]))
        with subprocess.Popen(**_bare_command()) as program, CpuMeter(program.pid) as meter:  # type: ignore[call-overload]
            output = program.stdout.read()
            _require_success(program)
        rounds["bare_ray"].append(meter.read(float(output)))
        print("CPU seconds", {name: each[-1] for name, each in rounds.items()}, flush=True)
    num_cores = read_machine_limits().num_cpus
    found = {}
    for name, measured in rounds.items():
        for kind in KINDS:
            found[f"{name}_cpu_{kind}"] = statistics.median(each[kind] for each in measured)
        found[f"{name}_cpu_bound"] = statistics.median(sum(each.values()) for each in measured) / num_cores
    return found


def _require_success(program: subprocess.Popen[str]) -> None:
    if program.wait() != 0:
        raise SystemExit(f"a program ended with status {program.returncode}")


class CpuMeter:
    """Samples the CPU seconds of a program and its processes, by kind, ten times a second while the block runs."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._used: dict[tuple[int, float], tuple[str, float]] = {}
        self._workers: set[int] = set()
        self._samples: list[tuple[float, dict[str, float]]] = []
        self._is_over = Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> CpuMeter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def read(self, end_s: float) -> dict[str, float]:
        """CPU seconds until a time, by kind: at least those of the last sample before it."""
        if len(self._workers) != NUM_WORKERS:
            raise SystemExit(f"{len(self._workers)} workers were seen, not {NUM_WORKERS}")
        at_s, cpu = [each for each in self._samples if each[0] <= end_s][-1]
        if end_s - at_s > MOST_LATE_S:
            raise SystemExit(f"the last sample is {end_s - at_s:.1f} s old")
        return cpu

    def _watch(self) -> None:
        while not self._is_over.wait(SAMPLE_S):
            self._look()
            sums = {kind: sum(cpu for each, cpu in self._used.values() if each == kind) for kind in KINDS}
            self._samples.append((time.time(), sums))

    def _look(self) -> None:
        wanted = ["pid", "ppid", "name", "cmdline", "cpu_times", "create_time"]
        found = {each.info["pid"]: each.info for each in psutil.process_iter(wanted)}
        children: dict[int, list[int]] = {}
        for pid, info in found.items():
            children.setdefault(info["ppid"], []).append(pid)
        todo = [(self._pid, "program")] if self._pid in found else []
        while todo:
            pid, kind = todo.pop()
            info = found[pid]
            if info["cpu_times"] is not None:
                cpu = info["cpu_times"].user + info["cpu_times"].system
                self._used[pid, info["create_time"]] = kind, cpu
            for child in children.get(pid, ()):
                if info["name"] == "raylet" and _is_worker(" ".join(found[child]["cmdline"] or ())):
                    self._workers.add(child)
                is_workers = kind == "workers" or child in self._workers
                todo.append((child, "workers" if is_workers else "ray"))


def _is_worker(line: str) -> bool:
    """Returns True for a child of the raylet that runs actors, by its command line, which becomes its title."""
    return "default_worker.py" in line or (line.startswith("ray::") and "Agent" not in line)


if __name__ == "__main__":
    sys.exit(main())
