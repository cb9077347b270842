"""Surrogates of a user's own that go wrong: each is named in one error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_algorithms.losses import PolicyLoss, Tokens
from hf_protocols import BatchError

COLUMNS = {"response_mask": torch.ones(2, 3, dtype=torch.bool), "advantages": torch.ones(2, 3)}


class Fixed:
    """Answers what it is made with, or what a function makes of the tokens."""

    reads = ()

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __call__(self, tokens: Tokens) -> Any:
        return self.answer(tokens) if callable(self.answer) else self.answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            lambda tokens: ((-tokens.logprobs).sum(), {}),
            r"the loss has the shape \(\)\. Return a number for each token",
        ),
        (lambda tokens: (tokens.logprobs.sum(1), {}), r"the loss has the shape \(2,\)"),
        (lambda tokens: (-tokens.logprobs, {"clip_low": torch.ones(2)}), r"clip_low has the shape \(2,\)"),
        (lambda tokens: (-tokens.logprobs, {"clip_low": 0.5}), r"clip_low has the shape 0\.5"),
        (lambda tokens: -tokens.logprobs, "it returned Tensor. Return the loss of each token"),
        (None, "it returned NoneType"),
        (lambda tokens: tokens.values, f"(?s)raised AttributeError: .*\n  at {__file__}:"),
    ],
)
def test_a_surrogate_that_goes_wrong_is_named(answer: Any, message: str) -> None:
    loss = PolicyLoss(surrogate=Fixed(answer), old="current")
    with pytest.raises(BatchError, match=f"^surrogate Fixed:? .*{message}" if "(?s)" not in message else message):
        loss({"logprobs": torch.zeros(2, 3)}, COLUMNS)


def test_a_surrogate_without_clips_is_enough() -> None:
    loss = PolicyLoss(surrogate=Fixed(lambda tokens: (-tokens.advantages * tokens.logprobs, {})), old="current")
    total, metrics = loss({"logprobs": torch.full((2, 3), -0.5)}, COLUMNS)
    assert float(total) == pytest.approx(3.0)
    assert metrics["clip_low"] == (0.0, 6.0)
