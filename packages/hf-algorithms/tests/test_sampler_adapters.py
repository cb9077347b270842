"""A run decides once how adapters reach its sampler."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_algorithms.config import load_config
from hf_algorithms.models.sampler_adapters import describe_merging, find_sent, takes_adapters
from hf_engine.testing import write_tiny_model

LORA = ["model.lora.rank=4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.mark.parametrize(
    ("backend", "given", "sent", "says"),
    [
        ("transformers", LORA, "both", []),
        ("transformers", [], "both", []),
        ("server", LORA, "merged", ["server is sent merged weights: this backend takes no adapters"]),
    ],
)
def test_a_sampler_without_adapters_is_named_once(
    model: str, tmp_path: Path, backend: str, given: list[str], sent: str, says: list[str]
) -> None:
    (tmp_path / "config.toml").write_text(f'[data]\ntrain = "x.jsonl"\n[rollout]\nbackend = "{backend}"\n')
    config = load_config(tmp_path / "config.toml", [*given, f"model.path='{model}'"])
    models: dict[str, Any] = {"actor": SimpleNamespace(path=model), "critic": SimpleNamespace(path="nowhere")}
    assert list(describe_merging(config, models)) == says
    assert find_sent(config, models) == sent
    assert takes_adapters(config, model) == (sent == "both" and bool(given))
