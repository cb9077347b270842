"""`make bench-gpu`: its work on a small model on the CPU, and one clear message where there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from math import prod
from pathlib import Path

import gpu_transition
import pytest
import torch
from gpu_transition import NO_GPU, measure

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
    ended = subprocess.run(
        [sys.executable, str(Path(gpu_transition.__file__))], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", NO_GPU + "\n")


@pytest.mark.gpu
def test_the_allocators_peak_stays_within_the_plan() -> None:
    found = measure(tiny_shape(num_layers=8, hidden_size=512, intermediate_size=2048), torch.device("cuda", 0), 2)
    assert found["is_equal"]
    assert 0 < found["peak_bytes"] <= found["planned_peak_bytes"]
