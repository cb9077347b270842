"""The sizes of a model of any family, by its files: the mapper plans with them before anything starts."""

from __future__ import annotations

from hf_engine.model_directory import ModelDirectory
from hf_protocols.models import ModelShape

__all__ = ["derive_shape"]


def derive_shape(model: ModelDirectory) -> ModelShape:
    """Sizes and parameters of a model, without its weights.

    Of a family that `ModelShape` does not know, names and sizes are those of the model that transformers builds: the
    generic shape, see `ModelShape.from_parameters`.

    Raises:
        BackendError: for sizes that are missing or not plausible, or a model that transformers does not build.
    """
    if ModelShape.knows(model.config):
        return model.require_shape()
    from hf_engine.backends._causal_lm import read_shape
    from hf_engine.backends._classifier import build_by_architecture

    return read_shape(model, build_by_architecture(model))
