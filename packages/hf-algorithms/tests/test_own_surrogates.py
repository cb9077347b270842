"""Surrogates of a user's own that go wrong: each is named in one error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_algorithms.losses import KLTerm, PolicyLoss, Tokens
from hf_protocols import BatchError, ConfigError

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
        (
            lambda tokens: (-tokens.logprobs, {"clip_low": torch.full((2, 3), 2)}),
            r"the mask clip_low has dtype torch\.int64\. Return True where",
        ),
        (
            lambda tokens: (-tokens.logprobs, {"clip_low": torch.ones(2, 3)}),
            "the mask clip_low has dtype torch.float32",
        ),
        (
            lambda tokens: (-tokens.logprobs, {"policy_loss": tokens.mask}),
            "it returned a mask named 'policy_loss', which the loss itself reports. Rename it",
        ),
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


@pytest.mark.parametrize("detach", [lambda tokens: tokens.logprobs.detach(), lambda tokens: torch.zeros(2, 3)])
def test_a_surrogate_without_gradient_is_named(detach: Any) -> None:
    """Also where a KL term would give the loss a gradient of its own."""
    kl = KLTerm(coefficient=0.1, estimator="k3", gradient="value")
    columns = COLUMNS | {"ref_logprobs": torch.zeros(2, 3)}
    logprobs = torch.zeros(2, 3, requires_grad=True)
    surrogate = Fixed(lambda tokens: (-tokens.advantages * detach(tokens), {}))
    message = r"^surrogate Fixed: the loss has no gradient\. Compute it from tokens\.logprobs, without detach\(\)"
    for loss in (
        PolicyLoss(surrogate=surrogate, old="current"),
        PolicyLoss(surrogate=surrogate, old="current", kl=kl),
    ):
        with pytest.raises(BatchError, match=message):
            loss({"logprobs": logprobs}, columns)
        with torch.no_grad():
            assert float(loss({"logprobs": logprobs}, columns)[0]) == 0.0


@pytest.mark.parametrize(
    ("reads", "message"),
    [
        (("old_logprob",), r"reads 'old_logprob', which .* they have advantages, .*\. Did you mean old_logprobs\?$"),
        (
            ("values",),
            r"reads 'values', .* they have advantages, old_logprobs, rollout_logprobs\. Remove it from reads$",
        ),
        ("old_logprobs", r": its attribute reads is 'old_logprobs'\. Set it to a tuple of names among advantages, "),
        (None, r": its attribute reads is None\. Set it to a tuple"),
    ],
)
def test_columns_that_a_surrogate_is_not_given_are_refused(reads: Any, message: str) -> None:
    surrogate = Fixed(None)
    surrogate.reads = reads
    with pytest.raises(ConfigError, match=f"^surrogate Fixed ?{message}"):
        PolicyLoss(surrogate=surrogate)


def test_a_surrogate_may_read_columns_that_may_be_absent() -> None:
    surrogate = Fixed(lambda tokens: (-tokens.logprobs * tokens.advantages, {}))
    surrogate.reads = ("advantages", "rollout_logprobs?")
    assert float(PolicyLoss(surrogate=surrogate, old="current")({"logprobs": torch.ones(2, 3)}, COLUMNS)[0]) == -6.0


class WithOutputs(Fixed):
    outputs = ("logprobs", "entropy")


class WithoutTokens(Fixed):
    def __call__(self) -> Any:  # type: ignore[override]
        raise AssertionError("it is never called")


@pytest.mark.parametrize(
    ("surrogate", "message"),
    [
        (Fixed, r"Fixed: it is a class\. Pass an instance, Fixed\(\.\.\.\)"),
        (None, r"NoneType: None cannot be called\. Give it a method __call__"),
        (
            WithoutTokens(None),
            r"WithoutTokens: it cannot be called with tokens: too many positional arguments\. Define",
        ),
        (WithOutputs(None), r"WithOutputs: it has an attribute outputs, and a surrogate gets Tokens alone\. Remove"),
    ],
)
def test_what_is_not_a_surrogate_is_refused_when_made(surrogate: Any, message: str) -> None:
    """A step is traced before a run starts, so these errors leave no run behind."""
    with pytest.raises(ConfigError, match=f"^surrogate {message}"):
        PolicyLoss(surrogate=surrogate)
