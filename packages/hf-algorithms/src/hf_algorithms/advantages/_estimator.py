"""The contract of estimators."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import getattr_static, signature
from typing import TYPE_CHECKING, Protocol

from hf_protocols import ConfigError
from hf_protocols.validation import show

if TYPE_CHECKING:
    import torch

__all__ = ["Estimator", "check_estimator"]


class Estimator(Protocol):
    """A frozen object that travels with a call, and computes columns of a whole batch."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that it needs; one whose name ends in `?` may be absent."""

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that it returns."""

    def __call__(self, columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the columns of `writes`: [B], or [B, T] and 0 where `response_mask` is False."""


def check_estimator(estimator: object) -> None:
    """Refuses an object, which may be a user's own, that cannot be called as an estimator.

    Raises:
        ConfigError: for a class, an object that does not take the columns, and one without `reads` or `writes`.
    """
    if isinstance(estimator, type):
        raise ConfigError(f"estimator {estimator.__name__}: it is a class. Pass an instance, {estimator.__name__}(...)")
    label = f"estimator {type(estimator).__name__}"
    if not callable(estimator):
        raise ConfigError(f"{label}: {show(estimator)} cannot be called. Give it a method __call__(self, columns)")
    for name in ("reads", "writes"):
        if getattr_static(estimator, name, None) is None:
            raise ConfigError(f"{label}: it has no attribute {name}. Set it to a tuple of the columns that it {name}")
    try:
        signature(estimator).bind({})
    except TypeError as error:
        raise ConfigError(
            f"{label}: it cannot be called with columns: {error}. Define __call__(self, columns)"
        ) from None
    except ValueError:  # written in C, and says nothing of its arguments
        pass
