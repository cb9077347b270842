"""`make bench-gpu`: its work on a small model on the CPU, and one clear message where there is no GPU."""

from __future__ import annotations

import json
import os
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


WITHOUT_RAY = """
import sys
from importlib import metadata

there, absent = metadata.version, ("ray", "pyarrow")

def version(name):
    if name in absent:
        raise metadata.PackageNotFoundError(name)
    return there(name)

metadata.version = version
sys.modules.update(dict.fromkeys(absent))

from hf_algorithms.cli import main
main()
"""
"""The command where two libraries are not installed."""


def test_a_run_in_process_needs_no_ray(small_config: Path, tmp_path: Path) -> None:
    """Nor pyarrow, which the bundle for a machine without network leaves out."""
    command = [sys.executable, "-c", WITHOUT_RAY, "train", str(small_config)]
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=paths)
    assert ended.returncode == 0, ended.stderr
    versions = json.loads((tmp_path / "run" / "summary.json").read_text())["versions"]
    assert sorted(versions) == ["hf-algorithms", "tensordict", "torch", "transformers"]


def test_a_bundle_takes_the_place_of_nothing_else(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "thesis.tex").touch()
    script = Path(bench_gpu.__file__).parents[1] / "scripts" / "gpu_bundle.sh"
    ended = subprocess.run(["bash", script, own], capture_output=True, text=True, timeout=280, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert f"{own} is there, and is not a bundle" in ended.stderr
    assert [each.name for each in own.iterdir()] == ["thesis.tex"]


def run_benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(bench_gpu.__file__)), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.gpu
def test_the_allocators_peak_stays_within_the_plan() -> None:
    found = measure(tiny_shape(num_layers=8, hidden_size=512, intermediate_size=2048), torch.device("cuda", 0), 2)
    assert found["is_equal"]
    assert 0 < found["peak_bytes"] <= found["planned_peak_bytes"]
