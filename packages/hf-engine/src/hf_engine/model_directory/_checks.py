"""Checks that the files of a directory are one causal language model that can be trained and can generate."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from hf_engine.model_directory._directory import ModelDirectory
from hf_engine.model_directory._end_tokens import check_end_of_sequence_ids, end_tokens_of
from hf_engine.model_directory._headers import StoredTensor
from hf_protocols.errors import ModelError
from hf_protocols.validation import show

__all__ = [
    "SCORE_HEADS",
    "VALUE_HEAD",
    "check_end_tokens",
    "check_head",
    "check_model_directory",
    "find_score_head",
    "is_buffer",
]

VALUE_HEAD = "value_head.weight"
"""Name of a critic's head in an exported directory, where the language model's name would promise logits."""
SCORE_HEADS = (VALUE_HEAD, "score.weight")
"""Names of a scalar head on the last hidden state: ours, and that of transformers' decoders with one label."""
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_BUFFERS = (
    ".inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    ".position_ids",
)
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.")
_CLASSIFIER = re.compile(
    r"(?:model\.)?(?:score|classifier|classification_head|v_head|value_head|reward_head|rm_head|regression_head|"
    r"qa_outputs)\.(?:.+\.)?(?:weight|bias)"
)
_CLASSIFIER_CLASS = re.compile(
    r"\w*(SequenceClassification|TokenClassification|QuestionAnswering|RewardModel|WithValueHead)"
)
_QUANTISED = (".qweight", ".qzeros", ".weight_scale", ".weight_scale_inv", ".weight_packed", ".SCB", ".absmax")
_TRAINABLE = ("F64", "F32", "F16", "BF16")
_MOST_NAMED = 5
_WHOLE = "Give a whole directory of one model"
_TIE = ", or set tie_word_embeddings to true in config.json if the embedding is the head"


def check_model_directory(model: ModelDirectory, *, head: Literal["lm", "value", "score"] = "lm") -> None:
    """Refuses what no backend trains or generates from, by headers alone.

    A family that `ModelShape` knows must hold its parameters in their shapes and nothing else; of another one layers,
    dtypes, embedding and kind are compared. Rotary buffers of old files and the copy of a tied head are left alone.

    Layers after the last one, which config.json counts as `num_nextn_predict_layers` (DeepSeek-V3, GLM-4.5), are not
    surplus: transformers lists them in `_keys_to_ignore_on_load_unexpected`, since only speculative decoding uses them.
    They are not trained, and `describe_export` takes them out of the configuration.

    Args:
        model: as it was read; one without tensors is checked by its configuration.
        head: `"value"` also takes a critic as backends export it, and a decoder with a classifier of one label;
            `"score"` takes any sequence classifier of one label, a critic, and a language model.

    Raises:
        ModelError: naming what differs.
    """
    if not isinstance(model.config.get("model_type"), str):
        raise model.refusal("has no model_type in its config.json, which names its family. Copy the file whole")
    _refuse_quantised(model)
    if head == "lm":
        _refuse_classifier(model)
    else:
        _refuse_labels(model, head)
    if not model.tensors:
        return
    _check_layers(model)
    expected = _expected(model, head)
    if expected is None:
        _check_embedding(model)
        return
    _check_parameters(model, expected)
    if _HEAD in model.tensors and _HEAD not in expected and head == "lm":
        check_head(model, _HEAD, _EMBEDDING, is_tied=True)


def check_head(model: ModelDirectory, head: str, embedding: str, *, is_tied: bool) -> None:
    """Refuses files whose head is not the one that their configuration describes: libraries disagree about them.

    Args:
        model: as it was read.
        head: name of the output layer's weight.
        embedding: name of the token embedding; files that lack it have other names, and are not compared.
        is_tied: whether the configuration says that the head is the embedding.

    Raises:
        ModelError: for a head of its own that is described as tied, or one that is neither tied nor there.
    """
    if embedding not in model.tensors:
        return
    if head not in model.tensors:
        shape = model.tensors[embedding].shape
        alike = [name for name, tensor in model.tensors.items() if tensor.shape == shape or name == VALUE_HEAD]
        if not is_tied and alike == [embedding]:  # else the head may be there under another name
            raise model.refusal(f"lacks the parameters {head}. {_WHOLE}{_TIE}")
        return
    if is_tied and not _are_equal(model.tensors[head], model.tensors[embedding]):
        raise model.refusal(
            f"config.json ties {show(head)} to {show(embedding)}, but the weights hold another one. Set "
            "tie_word_embeddings to false, or leave the head out of the files"
        )


def is_buffer(name: str) -> bool:
    """True for a tensor that follows from config.json: older libraries stored it, and nothing loads it."""
    return name.endswith(_BUFFERS)


def check_end_tokens(model: ModelDirectory) -> None:
    """Refuses end tokens outside the vocabulary, at which no response could end.

    Raises:
        ModelError: naming the file and the token.
    """
    file, ids = end_tokens_of(model.generation_config, model.config, model.text_config)
    if ids is None:
        return
    try:
        known = check_end_of_sequence_ids(ids, model.vocab_size)
    except ModelError:
        raise model.refusal(f"{file} has eos_token_id={show(ids)}. Use a token id or a list of them") from None
    tokens = [ids] if isinstance(ids, int) else list(ids)
    if outside := [token for token in tokens if token not in known]:
        raise model.refusal(
            f"{file} has eos_token_id={show(ids)}: {outside[0]} is outside the vocabulary of {model.vocab_size} "
            "tokens. Set it to the id of the token that ends a response, or give a model whose embedding has its row"
        )


def _refuse_quantised(model: ModelDirectory) -> None:
    stated = model.config.get("quantization_config") or model.config.get("compression_config")
    advice = "Weights are trained and sent to engines as floats. Use the model that it was made from"
    if stated:
        method = stated.get("quant_method") if isinstance(stated, Mapping) else None
        named = f"quant_method={show(method)}" if method else f"quantization_config={show(stated)}"
        raise model.refusal(f"is quantised ({named} in its config.json). {advice}")
    if packed := next((name for name in model.tensors if name.endswith(_QUANTISED)), None):
        raise model.refusal(f"is quantised: it holds {show(packed)}. {advice}")
    for name, tensor in model.tensors.items():
        if name.endswith((".weight", "_proj")) and tensor.dtype not in _TRAINABLE:
            raise model.refusal(f"is quantised: {show(name)} is stored as {tensor.dtype}. {advice}")


def find_score_head(model: ModelDirectory) -> str | None:
    """Returns the first tensor of a head that scores a sequence, under any library's name; None without one."""
    return min((name for name in model.tensors if _CLASSIFIER.fullmatch(name)), default=None)


def _refuse_classifier(model: ModelDirectory) -> None:
    found = find_score_head(model)
    if found is not None and VALUE_HEAD in model.tensors:
        raise model.refusal(
            f"is a critic: it holds {show(VALUE_HEAD)} in the place of a head that predicts tokens. {_LM}"
        )
    if found is not None:
        raise model.refusal(
            f"is a reward model or sequence classifier: it holds {show(found)} and cannot predict tokens. {_LM}"
        )
    if _CLASSIFIER_CLASS.fullmatch(model.architecture) and _HEAD not in model.tensors:
        raise model.refusal(
            f"is a reward model or sequence classifier ({model.architecture} in its config.json) and cannot predict "
            f"tokens. {_LM}"
        )


def _refuse_labels(model: ModelDirectory, head: str) -> None:
    """Refuses a head with more numbers than one; for a critic also one that is not a single matrix."""
    found = sorted(name for name in model.tensors if _CLASSIFIER.fullmatch(name))
    advice = "One number is needed. Give a sequence classifier with one label (num_labels = 1)"
    if model.is_classifier and model.num_labels != 1:
        raise model.refusal(f"has {model.num_labels} labels in its config.json ({model.architecture}). {advice}")
    if other := [name for name in found if name in SCORE_HEADS and model.tensors[name].shape[:1] != (1,)]:
        raise model.refusal(f"holds {show(other[0])} of shape {model.tensors[other[0]].shape}. {advice}")
    if head == "value" and (other := [name for name in found if name not in SCORE_HEADS]):
        raise model.refusal(
            f"holds {show(other[0])}: a critic takes the head of a decoder, {' or '.join(SCORE_HEADS)}. {_LM}"
        )


_LM = "Give the language model from which it was trained"


def _check_layers(model: ModelDirectory) -> None:
    stated = model.num_layers
    places = [match for name in _language_names(model) if (match := _LAYER.search(name))]
    held = {int(match[1]) for match in places}
    stacks = {match.string[: match.start(1)] for match in places}
    if stated is None or len(stacks) != 1:  # a model of several stacks counts its layers in its own way
        return
    surplus = sorted(layer for layer in held if layer >= stated + model.num_extra_layers)
    if surplus:
        raise model.refusal(
            f"its files hold {_span(surplus)} beyond num_hidden_layers = {stated} of its config.json: they "
            f"would be cut off. Set num_hidden_layers to {max(held) + 1}, or give a whole directory of one model"
        )
    if missing := sorted({*range(stated)} - held):
        raise model.refusal(
            f"its files lack {_span(missing)} of the {stated} that its config.json states (num_hidden_layers). "
            "Give a whole directory of one model"
        )


def _language_names(model: ModelDirectory) -> Iterable[str]:
    """Of a model with further kinds of input, the language model's."""
    if model.text_config is model.config:
        return model.tensors
    return [name for name in model.tensors if "language_model." in name or name.startswith("model.layers.")]


def _expected(model: ModelDirectory, head: str) -> dict[str, tuple[int, ...]] | None:
    """Shapes by name, where the family is known."""
    if model.shape is None:
        return None
    expected = model.shape.parameters()
    if head != "lm":
        expected.pop(_HEAD, None)
        expected |= {name: (1, model.shape.hidden_size) for name in SCORE_HEADS if name in model.tensors}
    return expected


def _check_parameters(model: ModelDirectory, expected: Mapping[str, tuple[int, ...]]) -> None:
    held = model.tensors
    allowed = {name for name in held if is_buffer(name) or name == _HEAD or _is_extra(model, name)}
    if missing := [name for name in expected if name not in held]:
        advice = _WHOLE + (_TIE if missing == [_HEAD] else "")
        raise model.refusal(f"lacks the parameters {_names(missing)}. {advice}")
    if surplus := [name for name in held if name not in expected and name not in allowed]:
        raise model.refusal(
            f"holds {_names(surplus)}, for which a {model.architecture or model.config.get('model_type')} of its "
            "config.json has no place: they would be ignored. Give a whole directory of one model"
        )
    if differing := [name for name, shape in expected.items() if held[name].shape != tuple(shape)]:
        name = differing[0]
        raise model.refusal(
            f"holds other weights than its config.json says: {len(differing)} of {len(expected)} parameters differ, "
            f"such as {show(name)}, which is {held[name].shape} and must be {tuple(expected[name])}. Give a whole "
            "directory of one model"
        )


def _is_extra(model: ModelDirectory, name: str) -> bool:
    match = _LAYER.search(name)
    return match is not None and int(match[1]) >= (model.num_layers or 0)


def _check_embedding(model: ModelDirectory) -> None:
    stated, name = model.text_config.get("vocab_size"), model.embedding
    if name is not None and stated is not None and model.tensors[name].shape[0] != stated:
        raise model.refusal(
            f"holds other weights than its config.json says: {show(name)} is {model.tensors[name].shape}, vocab_size "
            f"is {stated}. Give a whole directory of one model"
        )


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """By bytes: a NaN equals itself in them, and -0.0 is not 0.0."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(left == right for left, right in zip(one.chunks(), other.chunks(), strict=True))


def _names(names: Sequence[str]) -> str:
    rest = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _span(layers: Sequence[int]) -> str:
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if len(layers) > 2 and layers[-1] - layers[0] == len(layers) - 1:
        return f"layers {layers[0]} to {layers[-1]}"
    return f"layers {_names([str(layer) for layer in layers])}"
