"""Losses: pure functions of one micro-batch, each a small frozen object that travels with the call.

What must not live here: whole batches (`advantages`), workers, and keys of a configuration.

Every loss returns `(loss_sum, metrics)`: the weighted sum over the micro-batch's trained tokens, and
`{name: (sum, count)}`. The engine divides the sum over all micro-batches and ranks by that of `count`. Trained tokens
are those where `response_mask` is True: the response's, without padding and without observation tokens, such as a
tool's answer. What stands at other tokens changes nothing, not even NaN.
"""

from __future__ import annotations

from hf_algorithms.losses._aggregation import Aggregation, count_group_tokens
from hf_algorithms.losses._correction import Correction, measure_mismatch
from hf_algorithms.losses._distillation import DistillationLoss
from hf_algorithms.losses._kl_term import KLTerm
from hf_algorithms.losses._loss import Loss, LossOfOutputs
from hf_algorithms.losses._names import find_loss
from hf_algorithms.losses._policy import GAP_BOUND, PolicyLoss
from hf_algorithms.losses._preference import PreferenceLoss, PreferencePairs, label_pairs
from hf_algorithms.losses._ranking import CostRankingLoss, RankingLoss
from hf_algorithms.losses._supervised import SupervisedLoss
from hf_algorithms.losses._surrogates import (
    CISPO,
    DPPOTV,
    GMPO,
    SAPO,
    Clip,
    Reinforce,
    SequenceClip,
    SequenceProductClip,
    Surrogate,
    Tokens,
)
from hf_algorithms.losses._value import VALUE_MOMENTS, ValueLoss, compute_explained_variance

__all__ = [
    "CISPO",
    "DPPOTV",
    "GAP_BOUND",
    "GMPO",
    "SAPO",
    "VALUE_MOMENTS",
    "Aggregation",
    "Clip",
    "Correction",
    "CostRankingLoss",
    "DistillationLoss",
    "KLTerm",
    "Loss",
    "LossOfOutputs",
    "PolicyLoss",
    "PreferenceLoss",
    "PreferencePairs",
    "RankingLoss",
    "Reinforce",
    "SequenceClip",
    "SequenceProductClip",
    "SupervisedLoss",
    "Surrogate",
    "Tokens",
    "ValueLoss",
    "compute_explained_variance",
    "count_group_tokens",
    "find_loss",
    "label_pairs",
    "measure_mismatch",
]
