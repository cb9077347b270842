"""The model and the tokenizer that a run starts from: loaded, or made afresh from sizes and the training texts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_protocols import ConfigError, ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_algorithms.config import ModelConfig
    from hf_algorithms.data import Row

__all__ = ["InitialModel", "build_initial_model", "load_tokenizer"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, kw_only=True)
class InitialModel:
    """``path``: what transformers loads; ``tokenizer_path`` likewise; ``shape`` for the mapper."""

    path: str
    tokenizer_path: str
    tokenizer: PreTrainedTokenizerBase
    shape: ModelShape


def build_initial_model(config: ModelConfig, rows: Sequence[Row], *, directory: Path, seed: int) -> InitialModel:
    """Load the configured model, or write a fresh random one (and its tokenizer) to ``directory``.

    Raises:
        ConfigError: for a model or tokenizer that does not load, or has no end-of-sequence token.
    """
    tokenizer_path = _build_tokenizer(config, rows, directory)
    tokenizer = load_tokenizer(tokenizer_path)
    if config.path is None:
        _write_fresh_model(config, tokenizer, directory, seed)
    path = _find(config.path or str(directory))
    return InitialModel(path=path, tokenizer_path=tokenizer_path, tokenizer=tokenizer, shape=_load_shape(path))


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory or hub name.

    Raises:
        ConfigError: if there is none, or it has no end-of-sequence token.
    """
    from transformers import AutoTokenizer

    directory = Path(path)
    if directory.is_dir() and not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(f"{path} holds no tokenizer: set model.tokenizer to a directory, 'characters' or 'bpe'")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no tokenizer can be loaded from {path!r}: {_first_line(error)}; set model.tokenizer"
        ) from None
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {path!r} has no eos_token: responses could never end; set one")
    return tokenizer


def _build_tokenizer(config: ModelConfig, rows: Sequence[Row], directory: Path) -> str:
    from hf_algorithms.data import build_character_tokenizer, train_bpe_tokenizer

    texts = [row.prompt + row.answer for row in rows]
    if config.tokenizer == "characters":
        build_character_tokenizer("".join(sorted(set("".join(texts)))), directory)
    elif config.tokenizer == "bpe":
        train_bpe_tokenizer(texts, vocab_size=config.vocab_size, directory=directory)
    elif config.tokenizer is None and config.path is None:
        raise ConfigError("model.path and model.tokenizer are both absent: set model.tokenizer for a fresh model")
    else:
        return _find(config.tokenizer or config.path or "")
    return str(directory)


def _find(path: str) -> str:
    """A directory as every machine finds it, whatever folder its processes run in; a hub name as it is."""
    return os.path.abspath(path) if os.path.isdir(path) else path


def _write_fresh_model(config: ModelConfig, tokenizer: PreTrainedTokenizerBase, directory: Path, seed: int) -> None:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, LlamaConfig

    if config.hidden_size % config.num_heads:
        raise ConfigError(
            f"model.hidden_size={config.hidden_size} is not a multiple of model.num_heads={config.num_heads}"
        )
    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        max_position_embeddings=config.max_positions,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(llama)  # type: ignore[no-untyped-call]
        try:
            model.save_pretrained(directory)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"the fresh model cannot be written to {directory}: {error}") from None


def _load_shape(path: str) -> ModelShape:
    from transformers import AutoConfig

    try:
        return ModelShape.from_config({**AutoConfig.from_pretrained(path).to_dict(), "_name_or_path": Path(path).name})
    except (OSError, ValueError) as error:
        raise ConfigError(f"no model can be loaded from model.path={path!r}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
