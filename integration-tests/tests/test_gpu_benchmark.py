"""`make bench-gpu`: its work on a small model on the CPU, and one clear message where there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from math import prod
from pathlib import Path

import bench_gpu
import pytest
import torch
from bench_gpu import NO_GPU, PARTS, TARGETS
from gpu_transition import measure

from engine_testing.shapes import tiny_shape


def test_the_work_leaves_the_weights_as_they_were() -> None:
    found = measure(tiny_shape(), torch.device("cpu"), num_rounds=2)
    assert found["is_equal"]
    model = tiny_shape()
    largest = max(prod(shape) for shape in model.parameters().values())
    assert found["model_bytes"] == 2 * model.num_parameters
    blocks = len(model.parameters()) * (2 << 20)
    assert found["planned_peak_bytes"] - blocks == 2 * (model.num_parameters + largest)
    assert {name: len(found[name]) for name in ("copy", "move", "restore")} == {"copy": 2, "move": 2, "restore": 2}


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    ended = run_benchmark()
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", NO_GPU + "\n")


@pytest.mark.slow
def test_each_part_does_its_work_on_tiny_models() -> None:
    """All but vLLM's, which this environment does not have; the ratios of such models say nothing."""
    ended = run_benchmark("--small")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert "grpo_vllm: not run, as modules are missing: vllm" in lines
    for part in set(PARTS) - {"grpo_vllm"}:
        values = [float(line.split()[2]) for line in lines if line.startswith(f"{part}: ")]
        assert values and min(values) > 0
    assert all(any(f" {name} " in line for line in lines) for name in TARGETS)


def test_a_run_in_process_needs_no_ray() -> None:
    """Nor pyarrow, which the bundle for a machine without network leaves out."""
    program = "import sys; sys.modules.update(ray=None, pyarrow=None); import hf_algorithms.run.loop"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def run_benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(bench_gpu.__file__)), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.gpu
def test_the_allocators_peak_stays_within_the_plan() -> None:
    found = measure(tiny_shape(num_layers=8, hidden_size=512, intermediate_size=2048), torch.device("cuda", 0), 2)
    assert found["is_equal"]
    assert 0 < found["peak_bytes"] <= found["planned_peak_bytes"]
