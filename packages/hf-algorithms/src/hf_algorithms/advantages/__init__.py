"""Advantages: estimators as small frozen objects, and pure functions over one whole batch.

An estimator is callable: `(columns) -> {name: [B, T]}`. It declares the columns that it `reads` (a trailing `?` marks
one that may be absent) and `writes`. Values at masked tokens change nothing, not even NaN. The package also has the
shaping of scores, the filter of dynamic sampling, the metrics of groups, and the multiplier of a constraint. What must
not live here: losses, KL terms of a loss, and knowledge of workers or configuration files.
"""

from __future__ import annotations

from hf_algorithms.advantages._estimator import Estimator, check_estimator
from hf_algorithms.advantages._gae import GAE, LagrangianAdvantage
from hf_algorithms.advantages._group import GroupAdvantage, StdOver
from hf_algorithms.advantages._reinforce import ReinforceAdvantage
from hf_algorithms.advantages._returns import compute_gae, compute_token_rewards, spread_scores, whiten
from hf_algorithms.advantages._teacher import TeacherAdvantage
from hf_algorithms.advantages.filters import FilterMetric, select_groups
from hf_algorithms.advantages.multiplier import Multiplier
from hf_algorithms.advantages.shaping import LengthTerm, clip_scores, subtract_missing_eos
from hf_algorithms.advantages.statistics import compute_score_metrics

__all__ = [
    "GAE",
    "Estimator",
    "FilterMetric",
    "GroupAdvantage",
    "LagrangianAdvantage",
    "LengthTerm",
    "Multiplier",
    "ReinforceAdvantage",
    "StdOver",
    "TeacherAdvantage",
    "check_estimator",
    "clip_scores",
    "compute_gae",
    "compute_score_metrics",
    "compute_token_rewards",
    "select_groups",
    "spread_scores",
    "subtract_missing_eos",
    "whiten",
]
