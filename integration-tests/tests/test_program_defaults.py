"""A run inside a program that has its own torch modes, dtype or device by default."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_algorithms import train

MODEL = {
    "tokenizer": "characters",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 1,
    "num_heads": 1,
    "max_positions": 16,
}
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


BLOCKS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "inference_mode": torch.inference_mode,
    "bfloat16": partial(default_dtype, torch.bfloat16),
    "float64": partial(default_dtype, torch.float64),
    "device": partial(default_device, "meta"),
    "device block": partial(torch.device, "meta"),
}
"""A block is entered after the imports, because tensordict makes tensors when it is imported."""


def rate_length(completions: list[str], **_: Any) -> list[float]:
    return [-float(len(each)) for each in completions]


def run_ppo(output_dir: Path) -> list[dict[str, Any]]:
    settings = {
        "run.executor": "in_process",
        "run.output_dir": str(output_dir),
        "run.iterations": 2,
        "run.eval_every": 2,
        "rollout.batch_size": 4,
        "rollout.max_new_tokens": 4,
    }
    run = train(model=MODEL, dataset=ROWS, reward=rate_length, algorithm="ppo", set=settings)
    of_time = ("time/", "perf/", "memory/")
    return [{name: value for name, value in row.items() if not name.startswith(of_time)} for row in run.metrics]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ppo(tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.parametrize("name", BLOCKS)
def test_a_programs_defaults_change_no_metric(name: str, plain: list[dict[str, Any]], tmp_path: Path) -> None:
    with BLOCKS[name]():
        found = run_ppo(tmp_path / "run")
    assert len(found) == 2
    assert found == plain
