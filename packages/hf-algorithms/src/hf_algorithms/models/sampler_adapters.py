"""Decides how adapters reach the sampler of a run: as such, or merged into the weights that it is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hf_engine import SupportsAdapterUpdates, find_merging_reason, load_rollout_backend
from hf_engine.model_directory import read_model_directory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hf_algorithms.config import Config
    from hf_algorithms.models.initial_model import InitialModel

__all__ = ["describe_merging", "find_sent", "takes_adapters"]


def takes_adapters(config: Config, model: str) -> bool:
    """True if the run trains adapters that its rollout backend computes unmerged.

    Args:
        config: the run's.
        model: directory or hub name of the model that generates.
    """
    return config.model.lora is not None and _find_reason(config, model) is None


def describe_merging(config: Config, models: Mapping[str, InitialModel]) -> Iterator[str]:
    """Yields a line for the user where the sampler is sent merged weights in place of adapters.

    Args:
        config: the run's.
        models: of every role that holds one, by role.
    """
    for path in _find_samplers(config, models):
        if (reason := _find_reason(config, path)) is not None:
            yield f"{config.rollout.backend} is sent merged weights: {reason}"


def find_sent(config: Config, models: Mapping[str, InitialModel]) -> Literal["both", "adapters", "merged"]:
    """Returns what a transition brings to the sampler: base and adapters, these alone, or merged weights.

    Args:
        config: the run's.
        models: of every role that holds one, by role.
    """
    if not all(takes_adapters(config, path) for path in _find_samplers(config, models)):
        return "merged"
    return "adapters" if issubclass(load_rollout_backend(config.rollout.backend), SupportsAdapterUpdates) else "both"


def _find_samplers(config: Config, models: Mapping[str, InitialModel]) -> list[str]:
    """Models that generate in a run with adapters."""
    samplers = [role for role in models if hasattr(config.recipe.role(role).load_worker(), "generate_sequences")]
    return [models[role].path for role in samplers if config.model.lora is not None]


def _find_reason(config: Config, model: str) -> str | None:
    assert config.model.lora is not None, "asked for adapters"
    return find_merging_reason(
        load_rollout_backend(config.rollout.backend),
        read_model_directory(model, label="model.lora", needs_weights=False),
        config.model.lora.for_engine(),
        config.rollout.options,
        on_cpu=config.cluster.gpu == "cpu",
    )
