"""Writes the configuration of an exported model, true of the tensors next to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["describe_export"]

_STALE = ("_name_or_path", "compression_config", "quantization_config", "torch_dtype")
"""Of the source's files, not of what is written."""


def describe_export(config: Mapping[str, Any], *, dtype: str, vocab_size: int, ties_embeddings: bool) -> dict[str, Any]:
    """The `config.json` that belongs beside exported tensors.

    Args:
        config: the source's.
        dtype: of all tensors, by torch's name.
        vocab_size: rows of the embedding.
        ties_embeddings: whether the output layer is the embedding, and no tensor of its own.
    """
    written = {key: value for key, value in config.items() if key not in _STALE}
    written |= {"dtype": dtype, "tie_word_embeddings": ties_embeddings}
    if "text_config" not in written:
        written["vocab_size"] = vocab_size
    if written.get("num_nextn_predict_layers"):
        written["num_nextn_predict_layers"] = 0
    return written
