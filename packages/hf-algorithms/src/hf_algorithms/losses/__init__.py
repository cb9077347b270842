"""Losses: pure functions of one micro-batch, each a small frozen object that travels with the call.

Every loss answers ``(loss_sum, metrics)``: the sum over the micro-batch's trained tokens, which the engine divides
by their global number, and ``{name: (sum, count)}``. Trained tokens are those where ``response_mask`` is True: the
response's, without padding and without observation tokens, such as a tool's answer.
"""

from __future__ import annotations

from hf_algorithms.losses._policy import GAP_BOUND, PPOPolicyLoss
from hf_algorithms.losses._supervised import SupervisedLoss
from hf_algorithms.losses._value import PPOValueLoss

__all__ = ["GAP_BOUND", "PPOPolicyLoss", "PPOValueLoss", "SupervisedLoss"]
