"""The tokens at which responses of a model end by themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from hf_protocols.errors import ModelError
from hf_protocols.validation import are_whole, show

if TYPE_CHECKING:
    from hf_engine.model_directory._directory import ModelDirectory

__all__ = ["check_end_of_sequence_ids", "end_tokens_of", "read_end_of_sequence_ids"]


def read_end_of_sequence_ids(model: ModelDirectory) -> frozenset[int]:
    """The tokens that end a response of a model by themselves: its generation config's, else its config's; without
    those that its vocabulary lacks, which are never drawn.

    Raises:
        ModelError: for ends that are not token ids.
    """
    file, ids = end_tokens_of(model.generation_config, model.config, model.text_config)
    try:
        return frozenset() if ids is None else check_end_of_sequence_ids(ids, model.vocab_size)
    except ModelError:
        raise model.refusal(f"{file} has eos_token_id={show(ids)}. Use a token id or a list of them") from None


def end_tokens_of(generation: Mapping[str, Any], *configs: Mapping[str, Any]) -> tuple[str, Any]:
    """Returns the name of the first file that states end tokens, and its value."""
    if generation.get("eos_token_id") is not None:
        return "generation_config.json", generation["eos_token_id"]
    stated = (config["eos_token_id"] for config in configs if config.get("eos_token_id") is not None)
    return "config.json", next(stated, None)


def check_end_of_sequence_ids(ids: object, vocab_size: int) -> frozenset[int]:
    """Those of the vocabulary, of one id or a list of them.

    Raises:
        ModelError: for something else.
    """
    tokens = [ids] if isinstance(ids, int) and not isinstance(ids, bool) else ids
    if not are_whole(tokens):
        raise ModelError(f"the model's eos_token_id={show(ids)}. Use a token id or a list of them in its configuration")
    return frozenset(token for token in cast("Sequence[int]", tokens) if 0 <= token < vocab_size)
