"""Request for the outputs of a forward pass at each response token, as one value that backends hand on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_engine.training.token_logprobs import TokenScores, compute_token_logprobs
from hf_protocols.errors import BackendError
from hf_protocols.validation import Checks

__all__ = ["OutputRequest", "TokenColumn", "place_at"]

_check = Checks(BackendError)


class TokenColumn(NamedTuple):
    """Shape and dtype of what a column holds for each token."""

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, kw_only=True)
class OutputRequest:
    """The outputs of a language model at each response token: its `logprobs`, and what is asked for."""

    temperature: float = 1.0
    """Divides the logits."""
    entropy: bool = False
    """Adds `entropy`."""
    candidates: bool = False
    """Adds `candidate_logprobs`, of the tokens in the batch's `candidate_ids`."""
    top_k: int = 0
    """Adds `top_ids` and `top_logprobs` of this many likeliest tokens; 0: neither."""

    def check(self, vocab_size: int) -> None:
        """Refuses what a model of this vocabulary cannot answer.

        Raises:
            BackendError: for a temperature that is not above 0, or more tokens than there are.
        """
        _check.number("temperature", self.temperature)
        _check.count("top_k", self.top_k, least=0)
        if self.top_k > vocab_size:
            raise BackendError(f"top_k={self.top_k}: the model's vocabulary has {vocab_size} tokens. Lower it")

    def columns(self) -> dict[str, TokenColumn]:
        """The columns that scoring returns, by name."""
        found = {"logprobs": TokenColumn()}
        if self.entropy:
            found["entropy"] = TokenColumn()
        if self.top_k:
            shape = (self.top_k,)
            found |= {"top_ids": TokenColumn(shape, torch.int64), "top_logprobs": TokenColumn(shape)}
        return found

    def answer(
        self, logits: torch.Tensor, token_ids: torch.Tensor, candidate_ids: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """The outputs [n] or [n, k], by name.

        Args:
            logits: [n, V].
            token_ids: int64 [n].
            candidate_ids: int64 [n, k], or None.
        """

        def compute(candidates: torch.Tensor | None) -> TokenScores:
            return compute_token_logprobs(
                logits, token_ids, temperature=self.temperature, entropy=self.entropy, candidate_ids=candidates
            )

        return self.ask(compute, lambda: logits.detach().topk(self.top_k, dim=-1).indices, candidate_ids)

    def ask(
        self,
        compute: Callable[[torch.Tensor | None], TokenScores],
        find_top_ids: Callable[[], torch.Tensor],
        candidate_ids: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        """The outputs by name, from what computes them.

        Args:
            compute: the scores, with those of the given candidates.
            find_top_ids: the `top_k` likeliest tokens, the likeliest first.
            candidate_ids: of the batch, or None.
        """
        top_ids = find_top_ids() if self.top_k else None
        scores = compute(candidate_ids if top_ids is None else top_ids)
        found = {"logprobs": scores.logprobs}
        if scores.entropy is not None:
            found["entropy"] = scores.entropy
        if scores.candidate_logprobs is not None:
            found["candidate_logprobs" if top_ids is None else "top_logprobs"] = scores.candidate_logprobs
        return found if top_ids is None else found | {"top_ids": top_ids}


def place_at(positions: torch.Tensor, output: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The outputs [n, ...] at some positions of a flattened [b, T], as [b, T, ...] with zeros elsewhere."""
    flat = output.new_zeros(shape.numel(), *output.shape[1:])
    return flat.index_copy(0, positions, output).view(*shape, *output.shape[1:])
