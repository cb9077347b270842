"""Low-rank adapters as a user asks for them."""

from __future__ import annotations

from dataclasses import dataclass

from hf_protocols.errors import ConfigError
from hf_protocols.validation import Checks

__all__ = ["LoraConfig"]

_check = Checks(ConfigError)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Adapters in place of full weights: to each target `W` is added `alpha / rank * B A` (Hu et al. 2021, section 4).

    `A` [rank, in] starts at random, `B` [out, rank] at 0. The base is frozen; a value head or a classifier's head is
    trained whole.

    Raises:
        ConfigError: for a value out of range.
    """

    rank: int = 16
    """Rows of `A`, columns of `B`."""
    alpha: float = 32.0
    """The adapters' output is multiplied by `alpha / rank`."""
    dropout: float = 0.0
    """Share of an adapter's inputs that a train step leaves out; scoring and sampling leave out none."""
    targets: tuple[str, ...] | None = None
    """Ends of the names of linear layers, such as `("q_proj", "v_proj")`; None: all linear layers but the head."""

    def __post_init__(self) -> None:
        _check.count("rank", self.rank)
        _check.number("alpha", self.alpha)
        _check.number("dropout", self.dropout, may_be_zero=True)
        if self.dropout >= 1:
            raise ConfigError(f"dropout={self.dropout}: must be below 1. Lower it")
        if self.targets is not None:
            _check.kind("targets", self.targets, tuple | list, 'a tuple of names, ("q_proj", "v_proj")')
            for name in self.targets:
                _check.kind("a name in targets", name, str, "strings")
            if not self.targets or not all(self.targets):
                raise ConfigError(f"targets={list(self.targets)}: names no layer. Name some, or leave it out for all")

    @property
    def scaling(self) -> float:
        """Multiplies `B A`."""
        return self.alpha / self.rank
