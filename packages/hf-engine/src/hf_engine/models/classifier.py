"""Sequence classifiers of transformers with one label, read from a directory and written to one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from hf_engine.backends.versions import TRANSFORMERS
from hf_engine.model_directory import (
    SCORE_HEADS,
    ModelDirectory,
    check_model_directory,
    errors_of,
    find_score_head,
    is_buffer,
    read_model_directory,
)
from hf_engine.models.causal_lm import build_without_memory, prepare_loaded, read_tensor
from hf_engine.models.defaults import torch_defaults

__all__ = ["build_by_architecture", "build_classifier_without_memory", "has_classifier", "load_classifier"]

_LM_HEADS = ("lm_head", "embed_out", "output")
"""Layers of a language model from which a classifier takes the trunk alone."""


def has_classifier(files: ModelDirectory) -> bool:
    """True if transformers has a sequence classifier of this family; otherwise a value head stands in."""
    family = files.config.get("model_type")
    is_known = family in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    if files.is_classifier and not is_known:
        raise files.refusal(
            f"is a {files.architecture} of model_type {family!r}, of which transformers has no sequence classifier. "
            "Give another reward model"
        )
    return is_known


@torch_defaults()
def load_classifier(model: str | Path, dtype: torch.dtype) -> Any | None:
    """Loads a sequence classifier with one label; None for a family without one in transformers.

    The trunk may be that of a language model, whose head starts at 0, or of a critic, whose head is taken over.

    Raises:
        BackendError: for a directory that transformers cannot load one from, and for more labels than one.
    """
    TRANSFORMERS.check()
    files = read_model_directory(model)
    check_model_directory(files, head="score")
    if not has_classifier(files):
        return None
    with errors_of("transformers", f"{files.label}: cannot be loaded as a sequence classifier"):
        answer: Any = AutoModelForSequenceClassification.from_pretrained(
            files.path,
            config=_read_config(files),
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
        )
    loaded, report = answer
    _check_report(files, loaded, report)
    if not files.is_classifier:
        _set_head(files, loaded, sorted(report["missing_keys"]))
    prepare_loaded(files, loaded, dtype)
    return loaded


def build_by_architecture(files: ModelDirectory) -> Any:
    """The model that transformers builds from a configuration, on the device `meta`: a classifier if it names one.

    Raises:
        BackendError: for a configuration from which it builds none.
    """
    if not files.is_classifier:
        return build_without_memory(files)
    has_classifier(files)
    return build_classifier_without_memory(files)


def build_classifier_without_memory(files: ModelDirectory) -> Any:
    """The sequence classifier of a family that has one, on the device `meta`.

    Raises:
        BackendError: for a configuration from which transformers builds none.
    """
    with errors_of("transformers", f"{files.label}: its config.json cannot be used"):
        config = _read_config(files)
        with torch.device("meta"):
            build: Any = AutoModelForSequenceClassification.from_config
            return build(config, trust_remote_code=False)


def _read_config(files: ModelDirectory) -> Any:
    config = AutoConfig.from_pretrained(files.path, trust_remote_code=False, return_dict=True)
    config.num_labels = 1
    config.use_cache = False
    return config


def _check_report(files: ModelDirectory, loaded: Any, report: Mapping[str, Any]) -> None:
    """Refuses files that are not one model: a trunk that lacks parameters, or parameters without a place."""
    trunk = f"{loaded.base_model_prefix}."
    missing = sorted(name for name in report["missing_keys"] if files.is_classifier or name.startswith(trunk))
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise files.refusal(f"lacks the parameters {shown}. Give a whole directory of one model")
    if differing := sorted(name for name, *_ in report["mismatched_keys"]):
        raise files.refusal(
            f"holds other weights than its config.json says: {len(differing)} parameters differ, such as "
            f"{differing[0]!r}. Give a whole directory of one model"
        )
    unexpected = [name for name in report["unexpected_keys"] if not is_buffer(name)]
    if not files.is_classifier:
        unexpected = [
            name for name in unexpected if name not in SCORE_HEADS and name.rpartition(".")[0] not in _LM_HEADS
        ]
    if surplus := sorted(unexpected):
        raise files.refusal(
            f"holds {surplus[0]} ({len(surplus)} such), for which a {type(loaded).__name__} has no place: it would be "
            "ignored. Give a whole directory of one model"
        )


def _set_head(files: ModelDirectory, loaded: Any, fresh: Sequence[str]) -> None:
    """Starts the head at 0, so that every rank has the same, or at a critic's."""
    stored = find_score_head(files)
    parameters = dict(loaded.named_parameters())
    with torch.no_grad():
        for name in fresh:
            parameters[name].zero_()
            value = read_tensor(files, stored) if stored is not None else None
            if value is not None and value.shape == parameters[name].shape:
                parameters[name].copy_(value)
