"""Causal language models of transformers, read from a directory and written to one, with errors of ours."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hf_engine.backends._model_directory import check_model, read_end_of_sequence_ids
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
        # Its own error of a size that differs names no parameter.
        answer: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except BackendError:
        raise
    except Exception as error:  # of a configuration that it cannot use it raises anything
        asked = not isinstance(error, FileNotFoundError) and not os.path.isdir(str(model))
        taken = ", a name on the hub as there is no such directory here" if asked else ""
        raise BackendError(
            f"transformers cannot load a causal language model from {str(model)!r}{taken}: {error}"
        ) from error
    loaded, report = answer
    _refuse_other_sizes(model, report["mismatched_keys"])
    config = loaded.config.get_text_config()
    _refuse_unused(model, loaded, config)
    layers = getattr(config, "num_hidden_layers", 1)
    if layers < 1:
        raise BackendError(f"{str(model)!r} has num_hidden_layers={layers} in its config.json; it must be at least 1")
    if Path(model).is_dir():
        # transformers goes on without a generation_config.json that it cannot read: responses would not end.
        read_end_of_sequence_ids(Path(model), config.vocab_size)
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


def _refuse_other_sizes(model: str | Path, differing: Collection[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    if differing:
        name, given, wanted = min(differing, key=lambda each: each[0])
        raise BackendError(
            f"transformers cannot load a causal language model from {str(model)!r}: its files hold {len(differing)} "
            f"parameters of other sizes than its config.json says, such as {name!r}, which is {tuple(given)} and must "
            f"be {tuple(wanted)}; give a whole directory of one model"
        )


def _refuse_unused(model: str | Path, loaded: Any, config: Any) -> None:
    """A cache of transformers forgets what is outside of a window, and so do engines, if the layers know it or not."""
    known = type(config)()
    for key in ("sliding_window", "attention_chunk_size", "layer_types"):
        value = getattr(config, key, None)
        is_full = key == "layer_types" and set(value or ()) <= {"full_attention"}
        if value is not None and not is_full and not hasattr(known, key):
            raise BackendError(
                f"{str(model)!r} has {key}={value} in its config.json, which no layer of a {type(loaded).__name__} "
                "has: remove it"
            )
