from __future__ import annotations

import csv
import functools
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from hf_mapper import ClusterSpec, MachineSpec, WorkloadSpec, gpu
from hf_protocols import Dataflow, MappingPlan, ModelShape


class Problem(NamedTuple):
    dataflow: Dataflow
    models: Mapping[str, ModelShape]
    cluster: ClusterSpec
    workload: WorkloadSpec


@pytest.fixture(scope="session")
def paper_problem() -> Callable[[str, str, int], Problem]:
    """The paper's set-up (section 8.1): equal models, machines of 8 A100-80GB, 1024 prompts of 1024 + 1024 tokens."""

    def build(algorithm: str, model: str, num_gpus: int) -> Problem:
        dataflow = Dataflow.preset(algorithm)
        machine = MachineSpec(gpu=gpu("a100-80"), num_gpus=8, num_machines=num_gpus // 8)
        return Problem(
            dataflow,
            {role: ModelShape.preset(model) for role in dataflow.roles if role != "advantage"},
            ClusterSpec(machines=(machine,), inter_bandwidth_bytes_per_s=25e9),
            WorkloadSpec(global_batch=1024, prompt_tokens=1024, response_tokens=1024, mini_batches=8),
        )

    return build


@pytest.fixture
def tiny() -> ModelShape:
    """About a million parameters, as the quickstart's model."""
    return ModelShape(
        name="tiny",
        num_layers=4,
        hidden_size=128,
        intermediate_size=384,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        vocab_size=32,
        max_positions=64,
    )


def load_oracle() -> ModuleType:
    path = Path(__file__).with_name("test_search_oracle.py")
    spec = importlib.util.spec_from_file_location("search_oracle", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def oracle() -> ModuleType:
    """The search's brute force and random problems, for tests that hold other things against them."""
    return load_oracle()


@pytest.fixture(scope="session")
def solved() -> Callable[[int], MappingPlan | None]:
    """The plan of the random problem of a seed, None where nothing fits; several tests look at one search."""
    module = load_oracle()
    return functools.cache(lambda seed: module.solve(module.draw_problem(seed)))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows as one CSV file of a folder, which it returns."""

    def write_rows(rows: list[dict[str, Any]], name: str = "table.csv") -> Path:
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        return tmp_path

    return write_rows
