"""Causal language models of transformers, read from a directory and written to one, with errors of ours."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from hf_engine.backends._base import Head
from hf_engine.backends._versions import TRANSFORMERS
from hf_engine.model_directory import (
    SCORE_HEADS,
    ModelDirectory,
    check_model_directory,
    describe_export,
    errors_of,
    is_buffer,
    read_end_of_sequence_ids,
    read_model_directory,
)

__all__ = ["LoadedModel", "build_without_memory", "load_causal_lm", "refuse_lacking", "save_causal_lm"]

_OUTPUTS = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}
"""Keys of config.json that change what a forward pass returns: backends read its logits by name."""


class LoadedModel(NamedTuple):
    """A model in memory, and the files that it is from."""

    model: Any
    missing: list[str]
    """Parameters that the files lack: transformers draws these at random."""
    files: ModelDirectory


def load_causal_lm(model: str | Path, dtype: torch.dtype, head: Head = "lm") -> LoadedModel:
    """Loads a causal language model whose files are checked first.

    Raises:
        BackendError: for a directory that transformers cannot load one from, or an unsupported version of it.
    """
    TRANSFORMERS.check()
    files = read_model_directory(model)
    check_model_directory(files, head=head)
    read_end_of_sequence_ids(files)
    with errors_of("transformers", f"{files.label}: cannot be loaded as a causal language model"):
        # Its own error of a size that differs names no parameter.
        answer: Any = AutoModelForCausalLM.from_pretrained(
            files.path,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
            **_OUTPUTS,
        )
    loaded, report = answer
    _refuse_other_sizes(files, report["mismatched_keys"])
    _refuse_surplus(files, loaded, report["unexpected_keys"], () if head == "lm" else SCORE_HEADS)
    _refuse_unused(files, loaded)
    return LoadedModel(loaded, sorted(report["missing_keys"]), files)


def build_without_memory(files: ModelDirectory) -> Any:
    """The model that transformers builds from a configuration, on the device `meta`: what it refuses is said early.

    Raises:
        BackendError: for a configuration from which it builds none.
    """
    with errors_of("transformers", f"{files.label}: its config.json describes no causal language model"):
        config = AutoConfig.from_pretrained(files.path, trust_remote_code=False, **_OUTPUTS)
        with torch.device("meta"):
            built: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    if files.generation_config:
        with errors_of("transformers", f"{files.label}: its generation_config.json cannot be used"):
            GenerationConfig.from_pretrained(files.path)
    _refuse_unused(files, built)
    return built


def refuse_lacking(files: ModelDirectory, missing: Sequence[str]) -> None:
    """Refuses a model whose files lack parameters, or have them under other names.

    Raises:
        BackendError: naming them.
    """
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise files.refusal(f"lacks the parameters {shown}. Give a whole directory of one model")


def save_causal_lm(model: Any, weights: Mapping[str, torch.Tensor], directory: Path, *, head: str) -> None:
    """Writes the model's configuration and these weights, by name; `head` is the output layer's."""
    generation = model.generation_config
    # transformers reads settings of generation that contradict each other, and refuses to write them.
    model.generation_config = type(generation)()
    try:
        model.save_pretrained(directory, state_dict=weights)
    finally:
        model.generation_config = generation
    generation.to_json_file(directory / "generation_config.json", use_diff=True)
    path, embedding = directory / "config.json", model.get_input_embeddings().weight
    written = describe_export(
        json.loads(path.read_text(encoding="utf-8")),
        dtype=str(embedding.dtype).removeprefix("torch."),
        vocab_size=embedding.shape[0],
        ties_embeddings=head not in weights,
    )
    path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _refuse_other_sizes(files: ModelDirectory, differing: Collection[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    if differing:
        name, given, wanted = min(differing, key=lambda each: each[0])
        raise files.refusal(
            f"holds other weights than its config.json says: {len(differing)} parameters differ, such as {name!r}, "
            f"which is {tuple(given)} and must be {tuple(wanted)}. Give a whole directory of one model"
        )


def _refuse_surplus(
    files: ModelDirectory, loaded: Any, unexpected: Collection[str], heads: Collection[str] = ()
) -> None:
    """Of families that `ModelShape` does not know; transformers leaves out what a family is known to carry beside."""
    if surplus := sorted(name for name in unexpected if not is_buffer(name) and name not in heads):
        raise files.refusal(
            f"holds {surplus[0]} ({len(surplus)} such), for which a {type(loaded).__name__} has no place: it would be "
            "ignored. Give a whole directory of one model"
        )


def _refuse_unused(files: ModelDirectory, loaded: Any) -> None:
    """A cache of transformers forgets what is outside of a window, and so do engines, if the layers know it or not."""
    config = loaded.config.get_text_config()
    known = type(config)()
    for key in ("sliding_window", "attention_chunk_size", "layer_types"):
        value = getattr(config, key, None)
        is_full = key == "layer_types" and set(value or ()) <= {"full_attention"}
        if value is not None and not is_full and not hasattr(known, key):
            raise files.refusal(
                f"has {key}={value} in its config.json, which no layer of a {type(loaded).__name__} has. Remove it"
            )
