"""A model directory as it was read: configuration, generation configuration and headers of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hf_engine.model_directory._headers import StoredTensor
from hf_engine.model_directory._paths import find_model, label_of
from hf_engine.model_directory._weight_files import has_weights, read_tensors, refuse_other_kinds
from hf_protocols.errors import ConfigError, ModelError
from hf_protocols.models import ModelShape
from hf_protocols.outer_files import read_json_object
from hf_protocols.positions import compute_positions
from hf_protocols.validation import show

__all__ = ["ModelDirectory", "read_model_directory"]

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_SIZES = (*_LAYERS, "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
_MOST = 2**31 - 1
_DROPOUTS = ("attention_dropout", "hidden_dropout", "dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop")
_DTYPES = (None, "auto", "float16", "half", "bfloat16", "float32", "float", "float64", "double")


@dataclass(frozen=True, kw_only=True)
class ModelDirectory:
    """The configuration and the headers of one directory, before any weights are loaded.

    Raises:
        ModelError: for a size in `config` that is not a whole number, a dropout that is not from 0 to 1, or rotary
            embeddings stretched in no known way.
    """

    label: str
    """Beginning of messages: the key and value that the user wrote."""
    path: Path
    config: Mapping[str, Any]
    """Keys of `config.json`."""
    generation_config: Mapping[str, Any]
    """Keys of `generation_config.json`; empty without one."""
    tensors: Mapping[str, StoredTensor]
    """By name, over all files; empty where the directory holds no weights and none were needed."""

    def __post_init__(self) -> None:
        for key in _SIZES:
            size = self.text_config.get(key)
            if size is not None and (type(size) is not int or not 1 <= size <= _MOST):
                raise self.refusal(
                    f"has {key}={show(size)} in its config.json. Use a whole number of at least 1 and at most {_MOST}"
                )
        for key in _DROPOUTS:
            share = self.text_config.get(key)
            if share is not None and (
                isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1
            ):
                raise self.refusal(f"has {key}={show(share)} in its config.json. Use a number from 0 to 1")
        if self.dtype not in _DTYPES:
            raise self.refusal(
                f"has dtype={show(self.dtype)} in its config.json, which no weights have. Set it to float32"
            )
        try:
            compute_positions(self.text_config)
        except ConfigError as error:
            raise self.refusal(str(error)) from None

    def refusal(self, reason: str) -> ModelError:
        """An error about this directory, to raise."""
        return ModelError(f"{self.label}: {reason}")

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The keys that describe the language model: of a model of several kinds of input, its `text_config`."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, Mapping) else self.config

    @property
    def architecture(self) -> str:
        """The first of `architectures`; empty where the configuration names none."""
        named = self.config.get("architectures")
        return str(named[0]) if isinstance(named, list) and named else ""

    @property
    def is_classifier(self) -> bool:
        """True where the configuration names one of transformers' sequence classifiers."""
        return self.architecture.endswith("ForSequenceClassification")

    @property
    def num_labels(self) -> int:
        """Numbers that a sequence classifier answers; transformers counts 2 where the configuration does not say."""
        stated, names = self.config.get("num_labels"), self.config.get("id2label")
        if isinstance(names, Mapping) and names:
            return len(names)
        return stated if type(stated) is int else 2

    @property
    def num_layers(self) -> int | None:
        """Decoder layers, under the family's own name for them; None if unknown."""
        return next((self.text_config[key] for key in _LAYERS if self.text_config.get(key) is not None), None)

    @property
    def num_extra_layers(self) -> int:
        """Layers after the last that predict further tokens: training frameworks and `transformers` leave them out."""
        extra = self.text_config.get("num_nextn_predict_layers")
        return extra if type(extra) is int and extra > 0 else 0

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; 0 where neither weights nor configuration say."""
        embedding = self.embedding
        if embedding is not None:
            return self.tensors[embedding].shape[0]
        return int(self.text_config.get("vocab_size") or 0)

    @property
    def embedding(self) -> str | None:
        """Name of the token embedding among the tensors."""
        ends = (
            "embed_tokens.weight",
            "wte.weight",
            "word_embeddings.weight",
            "embed_in.weight",
            "tok_embeddings.weight",
        )
        matrices = (name for name, tensor in self.tensors.items() if len(tensor.shape) == 2)
        found = (name for name in matrices if f".{name}".endswith(tuple(f".{end}" for end in ends)))
        return min(found, key=len, default=None)

    @property
    def dtype(self) -> str | None:
        """As `config.json` says, by torch's name."""
        stated = self.text_config.get("dtype") or self.text_config.get("torch_dtype")
        stated = stated or self.config.get("dtype") or self.config.get("torch_dtype")
        return str(stated).removeprefix("torch.") if stated else None

    @property
    def max_positions(self) -> int | None:
        """Longest sequence, with what stretches rotary embeddings; None where the configuration does not say."""
        return compute_positions(self.text_config)

    @cached_property
    def shape(self) -> ModelShape | None:
        """Sizes and parameters, where `ModelShape` knows the family and its keys; see `require_shape`."""
        try:
            return self.require_shape()
        except ModelError:
            return None

    def require_shape(self) -> ModelShape:
        """Sizes and parameters.

        Raises:
            ModelError: for a family whose parameters are not known.
        """
        try:
            return ModelShape.from_config(self.config)
        except ConfigError as error:
            raise self.refusal(f"its parameters have no known layout ({error})") from error


def read_model_directory(model: str | Path, *, label: str | None = None, needs_weights: bool = True) -> ModelDirectory:
    """Reads a model's configuration and the headers of its weights; nothing is compared, see `check_model_directory`.

    Args:
        model: a directory, or a name on the hub, which is fetched.
        label: what messages begin with, such as the user's key and value; the model by default.
        needs_weights: False also takes a directory that holds configuration alone.

    Raises:
        ModelError: for what is absent, is something else than a model, or cannot be read.
    """
    name = label or label_of(model)
    directory = find_model(model, label=name, needs_weights=needs_weights)
    try:
        refuse_other_kinds(directory)
        config = read_json_object(ModelError, directory / "config.json", name="config.json")
        generation = directory / "generation_config.json"
        is_there = generation.exists() or generation.is_symlink()
        stated = read_json_object(ModelError, generation, name=generation.name) if is_there else {}
        tensors = read_tensors(directory) if needs_weights or has_weights(directory) else {}
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from None
    except OSError as error:
        raise ModelError(f"{name}: cannot be read: {error.strerror}") from None
    return ModelDirectory(label=name, path=directory, config=config, generation_config=stated, tensors=tensors)
