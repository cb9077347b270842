"""Lengths of rows at which rotary embeddings change their frequencies.

transformers chooses the frequencies of all rows of a forward pass by the longest of them. Rows that alone would have
others must not be in one pass with it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_protocols.errors import BackendError, BatchError

__all__ = ["NO_ROPE_LIMITS", "RopeLimits", "find_rope_limits"]


@dataclass(frozen=True, kw_only=True)
class RopeLimits:
    """Lengths at which the frequencies of a model change; by default they never do."""

    splits: tuple[int, ...] = ()
    """`longrope`: rows of at most so many tokens have other frequencies than longer ones. Ascending."""
    longest: int | None = None
    """`dynamic`: above so many tokens every length has frequencies of its own; None: no such length."""

    @property
    def rope_type(self) -> str | None:
        """The type of rotary embeddings that depend on the longest row of a pass; None: they do not."""
        return "dynamic" if self.longest is not None else "longrope" if self.splits else None

    def range_of(self, tokens: int) -> int:
        """Number of the range that a length is in. Rows of one range have the same frequencies."""
        return bisect_left(self.splits, tokens)

    def check_rows(self, lengths: Sequence[int]) -> None:
        """Refuses rows that no micro-batch with other lengths may hold.

        Args:
            lengths: tokens of each row, prompt and response together.

        Raises:
            BatchError: for a row above `longest`.
        """
        if self.longest is None:
            return
        tokens = max(lengths, default=0)
        if tokens > self.longest:
            raise BatchError(
                f"row {lengths.index(tokens)} has {tokens} tokens, above max_position_embeddings={self.longest}: with "
                "rope_type='dynamic' the frequencies of longer rows depend on the longest row of a forward pass. Lower "
                "data.max_prompt_tokens or rollout.max_new_tokens, or choose a model with another rope_type"
            )

    def check_prompts(self, lengths: Sequence[int], max_new_tokens: int) -> None:
        """Refuses prompts whose responses may end where cached keys have other frequencies than the whole row.

        Args:
            lengths: tokens of each prompt.
            max_new_tokens: of a response.

        Raises:
            BackendError: for a row that may grow above `longest`, or from one range into another.
        """
        if self.rope_type is None:
            return
        for row, prompt in enumerate(lengths):
            whole = prompt + max_new_tokens
            given = f"prompt of row {row} has {prompt} tokens, with max_new_tokens={max_new_tokens} up to {whole}"
            if self.longest is not None and whole > self.longest:
                raise BackendError(
                    f"{given}, above max_position_embeddings={self.longest}: with rope_type='dynamic' the frequencies "
                    "of longer rows change with each token, but cached keys keep theirs. Lower data.max_prompt_tokens "
                    "or rollout.max_new_tokens, or choose a model with another rope_type"
                )
            if self.range_of(prompt) != self.range_of(whole):
                split = self.splits[self.range_of(prompt)]
                raise BackendError(
                    f"{given}, across original_max_position_embeddings={split}: with rope_type='longrope' longer rows "
                    "have other frequencies, but cached keys keep those of shorter ones. Lower data.max_prompt_tokens "
                    f"or rollout.max_new_tokens to stay within {split} tokens, or use prompts of more than {split}"
                )


NO_ROPE_LIMITS = RopeLimits()
"""Of models whose rows have the same frequencies in every pass."""


def find_rope_limits(config: Any) -> RopeLimits:
    """Returns the lengths at which the frequencies of a model change.

    Args:
        config: of transformers, for the language model. It may have rotary parameters for each kind of layer.
    """
    found = list(_list_parameters(config.to_dict()))
    splits = {each["original_max_position_embeddings"] for each in found if each["rope_type"] == "longrope"}
    is_dynamic = any(each["rope_type"] == "dynamic" for each in found)
    return RopeLimits(splits=tuple(sorted(splits)), longest=config.max_position_embeddings if is_dynamic else None)


def _list_parameters(settings: object) -> Iterator[Mapping[str, Any]]:
    """Every object of a configuration that has a `rope_type`."""
    if isinstance(settings, Mapping):
        if isinstance(settings.get("rope_type"), str):
            yield settings
        for value in settings.values():
            yield from _list_parameters(value)
