"""Prompts from which a sampler does not generate are found before anything starts."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hf_algorithms.config import Config, parse_config
from hf_algorithms.data import build_character_tokenizer
from hf_algorithms.evaluation.generation import generate
from hf_algorithms.evaluation.model_evaluation import evaluate
from hf_algorithms.preflight.checks import check_run
from hf_engine.testing import write_tiny_family
from hf_protocols import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose frequencies change above 16 tokens."""
    sizes = {"vocab_size": 32, "max_position_embeddings": 64}
    directory = write_tiny_family(
        tmp_path / "model", "phi3", **sizes, original_max_position_embeddings=16, rope_parameters=LONG
    )
    build_character_tokenizer("0123456789+=a ", directory)
    return directory


def configure(model: Path, folder: Path, prompts: dict[str, str], **changes: Any) -> Config:
    files = {}
    for name, prompt in prompts.items():
        files[name] = str(folder / f"{name}.jsonl")
        rows = [{"prompt": each, "answer": "2"} for each in ("1+1=", prompt, "1+1=")]
        Path(files[name]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    rollout = {"batch_size": 4, "max_new_tokens": 8} | changes
    return parse_config({"data": files, "model": {"path": str(model)}, "rollout": rollout, "run": {"executor": "ray"}})


SHORT = {"train": "1+1=", "validation": "2+2=", "test": "3+3="}


@pytest.mark.parametrize("name", SHORT)
def test_a_response_that_may_cross_a_limit_is_refused(model: Path, tmp_path: Path, name: str) -> None:
    config = configure(model, tmp_path, SHORT | {name: "1111+2222="})
    message = (
        rf"data\.{name} = '.*: prompt of row 1 has 10 tokens, with max_new_tokens=8 up to 18, across "
        r"original_max_position_embeddings=16: .* Lower data\.max_prompt_tokens or rollout\.max_new_tokens"
    )
    with pytest.raises(ConfigError, match=message):
        check_run(config, tmp_path)


def test_rows_on_one_side_of_a_limit_are_taken(model: Path, tmp_path: Path) -> None:
    config = configure(model, tmp_path, SHORT | {"train": "1111+2222="}, max_new_tokens=6)
    inputs, _ = check_run(config, tmp_path)
    assert inputs.train.max_prompt_tokens == 10


@pytest.mark.parametrize("draw", [generate, partial(evaluate, metrics="exact_match")], ids=["generate", "evaluate"])
def test_commands_refuse_what_may_cross_a_limit(model: Path, tmp_path: Path, draw: Callable[..., Any]) -> None:
    rows = [{"prompt": each, "answer": "2"} for each in ("1+1=", "1111+2222=")]
    with pytest.raises(ConfigError, match=r"prompt of row 1 has 10 tokens, with max_new_tokens=8 up to 18, across"):
        draw(model, data=rows, max_new_tokens=8, output_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()
