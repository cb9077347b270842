"""Causal language models of transformers, read from a directory and written to one, with errors of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hf_engine.backends._model_directory import check_model
from hf_engine.backends._versions import TRANSFORMERS
from hf_protocols.errors import BackendError

__all__ = ["load_causal_lm", "refuse_lacking", "save_causal_lm"]


def load_causal_lm(model: str | Path, dtype: torch.dtype) -> tuple[Any, list[str]]:
    """The model, and the names of parameters that its files lack: transformers draws these at random.

    Raises:
        BackendError: for a directory that transformers cannot load one from, or an unsupported version of it.
    """
    TRANSFORMERS.check()
    try:
        check_model(model)
        answer: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, output_loading_info=True)
    except BackendError:
        raise
    except Exception as error:  # of a configuration that it cannot use it raises anything
        raise BackendError(f"transformers cannot load a causal language model from {str(model)!r}: {error}") from error
    loaded, report = answer
    config = loaded.config.get_text_config()
    # A cache of transformers forgets what is outside of it, and so do engines, while the layers know nothing of it.
    if getattr(config, "sliding_window", None) is not None and not hasattr(type(config)(), "sliding_window"):
        raise BackendError(
            f"{str(model)!r} has sliding_window={config.sliding_window} in its config.json, which no layer of a "
            f"{type(loaded).__name__} has: remove it"
        )
    layers = getattr(config, "num_hidden_layers", 1)
    if layers < 1:
        raise BackendError(f"{str(model)!r} has num_hidden_layers={layers} in its config.json; it must be at least 1")
    return loaded, sorted(report["missing_keys"])


def refuse_lacking(model: str | Path, missing: Sequence[str]) -> None:
    """Refuses a model whose files lack parameters, or have them under other names.

    Raises:
        BackendError: naming them.
    """
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise BackendError(f"{str(model)!r} lacks the parameters {shown}: give a directory of the same model")


def save_causal_lm(model: Any, weights: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Writes the model's configuration and these weights, by name."""
    generation = model.generation_config
    # transformers reads settings of generation that contradict each other, and refuses to write them.
    model.generation_config = type(generation)()
    try:
        model.save_pretrained(directory, state_dict=weights)
    finally:
        model.generation_config = generation
    generation.to_json_file(directory / "generation_config.json", use_diff=True)
