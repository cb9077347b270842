"""The sizes of a model of any family, by its files: the mapper plans with them before anything starts."""

from __future__ import annotations

from hf_engine.model_directory import ModelDirectory
from hf_protocols.models import ModelShape

__all__ = ["derive_layout", "derive_shape"]


def derive_shape(model: ModelDirectory) -> ModelShape:
    """Sizes and parameters of a model, without its weights.

    Of a family that `ModelShape` does not know, names and sizes are those of the model that transformers builds: the
    generic shape, see `ModelShape.from_parameters`.

    Raises:
        BackendError: for sizes that are missing or not plausible, or a model that transformers does not build.
    """
    return derive_layout(model)[0]


def derive_layout(model: ModelDirectory) -> tuple[ModelShape, frozenset[str]]:
    """As `derive_shape`, and the names of the buffers that the files hold.

    Raises:
        BackendError: as `derive_shape`.
    """
    if ModelShape.knows(model.config):
        return model.require_shape(), frozenset()
    from hf_engine.models.causal_lm import read_shape
    from hf_engine.models.classifier import build_by_architecture
    from hf_engine.models.conversions import buffers_in_files

    built = build_by_architecture(model)
    return read_shape(model, built), frozenset(buffers_in_files(built))
