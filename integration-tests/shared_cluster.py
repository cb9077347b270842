"""One Ray cluster for many small runs: its start costs more than such a run does.

A program starts it, as a process has at most one cluster at a time. The cluster's workers are forked, each run is a job
of its own whose workers end with it, and nothing is kept between runs. What a test says about the start or the end of
a cluster is said of one that the run starts itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forked_workers import forked_workers

NUM_SLOTS = 16
PRELOADED = (
    "hf_algorithms.workers",
    "hf_engine.training.fsdp",
    "hf_engine.training.megatron",
    "hf_engine.rollout.transformers",
    "transformers.models.llama.modeling_llama",
)
"""Modules that the workers of runs need."""


@contextmanager
def shared_cluster() -> Iterator[str]:
    """Yields the address of a cluster that ends with the block; from then on this process enters clusters by token."""
    from ray._raylet import Config

    # Ray starts clusters so by default, and joins them so only by its settings, which it may have read already.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    Config.initialize("")
    here = Path(__file__).resolve().parent
    path = os.pathsep.join([str(here), str(here.parent / "benchmarks")])  # ranks import reward functions
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as program:
        assert program.stdin is not None and program.stdout is not None
        try:
            address = program.stdout.readline().strip()
            assert address, "the cluster did not start"
            yield address
        finally:
            program.stdin.close()
            program.wait(timeout=120)


def serve() -> None:
    """Prints the address, and stays until standard input ends."""
    from hf_controller import RayExecutor

    with forked_workers(PRELOADED), RayExecutor(num_cpus=NUM_SLOTS, start_timeout_s=180.0):
        import ray

        sys.stdout.write(f"{ray.get_runtime_context().gcs_address}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    serve()
