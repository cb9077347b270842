"""Losses by name, with their defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from hf_algorithms.losses._loss import Loss
from hf_algorithms.losses._policy import PolicyLoss
from hf_algorithms.losses._ranking import RankingLoss
from hf_algorithms.losses._supervised import SupervisedLoss
from hf_algorithms.losses._surrogates import Reinforce
from hf_algorithms.losses._value import ValueLoss
from hf_protocols import ConfigError
from hf_protocols.similar_names import find_similar
from hf_protocols.validation import show

__all__ = ["find_loss"]

_LOSSES: Mapping[str, Mapping[str, Callable[[], Any]]] = MappingProxyType(
    {
        "lm": {
            "supervised": SupervisedLoss,
            "ppo": PolicyLoss,
            "reinforce": lambda: PolicyLoss(surrogate=Reinforce()),
        },
        "value": {"value": ValueLoss},
        "score": {"ranking": RankingLoss},
    }
)
"""By the head of the model."""


def find_loss(name: str, head: str = "lm") -> Loss:
    """Returns the loss of a name, with its defaults.

    Of a language model they are `supervised`; `ppo`, which reads `advantages` and `old_logprobs`; and `reinforce`,
    which reads `advantages`. Of a critic it is `value`, which reads `returns`. These columns are jagged [B, T]. Of a
    reward model it is `ranking`.

    Args:
        name: of the loss.
        head: of the model.

    Raises:
        ConfigError: for a name that is not one of the head's.
    """
    known = _LOSSES[head]
    if name not in known:
        near = find_similar(name, known)
        names = f"Those of a model with the head {show(head)} are {', '.join(known)}"
        raise ConfigError(
            f"loss = {show(name)}: is not the name of a loss. {f'Did you mean {show(near[0])}?' if near else names}"
        )
    found: Loss = known[name]()
    return found
