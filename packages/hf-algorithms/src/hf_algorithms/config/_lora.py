"""The section of low-rank adapters: `[model.lora]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, field_validator

from hf_algorithms.config._section import Positive, Section

if TYPE_CHECKING:
    from hf_engine import LoraConfig as EngineLora

__all__ = ["ModelLoraConfig"]


class ModelLoraConfig(Section):
    """`[model.lora]`: adapters are trained in place of the weights of every role that learns (needs peft)."""

    rank: Annotated[int, Field(ge=1, le=1 << 16)] = 16
    """Rows of an adapter's inner matrix."""
    alpha: Positive = 32.0
    """The adapters' output is multiplied by `alpha / rank`."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that an update leaves out; scoring and sampling leave out none."""
    targets: tuple[str, ...] | None = Field(default=None, strict=False)
    """Ends of the names of linear layers, such as `["q_proj", "v_proj"]`; left out: all linear layers but the output
    layer.
    """
    save_merged: bool = False
    """Writes the whole model as well, to `model/merged/`."""

    @field_validator("targets", mode="before")
    @classmethod
    def _refuse_one_name(cls, value: object) -> object:
        if value == "all-linear":
            raise ValueError("is what an absent key means. Remove the key")
        return value

    def for_engine(self) -> EngineLora:
        """The adapters as a training backend takes them."""
        from hf_engine import LoraConfig as EngineLora

        return EngineLora(rank=self.rank, alpha=self.alpha, dropout=self.dropout, targets=self.targets)
