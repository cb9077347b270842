"""Low-rank adapters that are trained in place of a model's weights, counted from its shape."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hf_protocols import ConfigError, ModelShape
from hf_protocols.similar_names import describe_choices
from hf_protocols.validation import Checks, show

__all__ = ["AdapterSpec", "check_adapters", "count_adapter_parameters"]

_check = Checks(ConfigError)

_SENDS = Literal["both", "adapters", "merged"]
_LAYER = re.compile(r"\.\d+\.")
_NOT_LINEAR = re.compile(r"\.experts\.|(mlp|block_sparse_moe)\.(gate|router)\.|norm")
"""Matches parts of a layer that get no adapter: experts, which are stacked, the router before them, and norms."""


@dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    """Adapters of `rank` in the linear layers whose names end with one of `targets`; without targets in all of them.

    The weights are frozen then: held in float32, without gradients and optimizer state. `sends` names the content of a
    transition to generation: weights and adapters (`both`), the adapters alone, or weights into which they were merged.

    Raises:
        ConfigError: for a rank below 1, targets that are not names, or an unknown value of `sends`.
    """

    rank: int
    targets: tuple[str, ...] = ()
    sends: _SENDS = "both"

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ConfigError(f"adapters: rank={show(self.rank)} must be a whole number of at least 1")
        _check.one_of("adapters: sends", self.sends, get_args(_SENDS))
        given: Any = self.targets
        names = tuple(given) if isinstance(given, list | tuple) else (None,)
        if not all(isinstance(name, str) and name for name in names):
            raise ConfigError(f"adapters: targets={show(given)} must be a list of names, such as ['q_proj']")
        object.__setattr__(self, "targets", names)


def check_adapters(role: str, model: ModelShape, adapters: AdapterSpec) -> None:
    """Refuses targets that leave the model of `role` without any adapter.

    Raises:
        ConfigError: with the layers that get adapters, or the nearest of them.
    """
    if adapters.targets and not count_adapter_parameters(model, adapters):
        every = (name.removesuffix(".weight") for name, shape in model.parameters().items() if len(shape) == 2)
        known = sorted({name.rpartition(".")[2] for name in every if _is_adapted(name, ())})
        raise ConfigError(
            f"adapters: targets={show(list(adapters.targets))} name no linear layer of {role} {model.name}. "
            f"{describe_choices(adapters.targets[0], known)}"
        )


def count_adapter_parameters(model: ModelShape, adapters: AdapterSpec) -> int:
    """Parameters of both factors of every adapter: `rank * (rows + columns)` of each target."""
    return sum(
        adapters.rank * sum(shape)
        for name, shape in model.parameters().items()
        if len(shape) == 2 and _is_adapted(name.removesuffix(".weight"), adapters.targets)
    )


def _is_adapted(layer: str, targets: tuple[str, ...]) -> bool:
    is_linear = _LAYER.search(layer) is not None and not _NOT_LINEAR.search(f"{layer}.")
    return is_linear and (not targets or any(f".{layer}".endswith(f".{target}") for target in targets))
