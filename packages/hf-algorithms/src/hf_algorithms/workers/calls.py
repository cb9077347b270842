"""The calls of each role as recipes make them: batches go in and come out as futures.

A worker's method on the ranks and its call here take the same arguments, which a test compares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hf_algorithms.advantages import Estimator, FilterMetric, LengthTerm
    from hf_algorithms.losses import Loss
    from hf_algorithms.value_scale import ValueScale
    from hf_controller import BatchFuture, MetricsFuture, ObjectFuture
    from hf_engine import SamplingParams

__all__ = [
    "ActorCalls",
    "AdvantageCalls",
    "CostCalls",
    "CriticCalls",
    "PairScorerCalls",
    "ReferenceCalls",
    "RewardCalls",
]


class ActorCalls(Protocol):
    """Calls of `ActorWorker`."""

    def generate_sequences(self, batch: BatchFuture, sampling: SamplingParams) -> BatchFuture:
        """See `ActorWorker.generate_sequences`."""

    def compute_logprobs(
        self, batch: BatchFuture, *, temperature: float = 1.0, keep_graph: bool = False
    ) -> BatchFuture:
        """See `ActorWorker.compute_logprobs`."""

    def hold_pretraining(self, batch: BatchFuture) -> ObjectFuture:
        """See `ActorWorker.hold_pretraining`."""

    def update_actor(
        self, batch: BatchFuture, loss: Loss, *, temperature: float = 1.0, pretrain_weight: float = 0.0
    ) -> MetricsFuture:
        """See `ActorWorker.update_actor`."""


class CriticCalls(Protocol):
    """Calls of `CriticWorker`, of rewards or of costs."""

    def compute_values(
        self, batch: BatchFuture, *, scale: ValueScale | None = None, keep_graph: bool = False
    ) -> BatchFuture:
        """See `CriticWorker.compute_values`."""

    def compute_values_after(
        self, batch: BatchFuture, *, max_tokens: int, scale: ValueScale | None = None, keep_graph: bool = False
    ) -> BatchFuture:
        """See `CriticWorker.compute_values_after`."""

    def update_critic(self, batch: BatchFuture, loss: Loss) -> MetricsFuture:
        """See `CriticWorker.update_critic`."""


class ReferenceCalls(Protocol):
    """Calls of `ReferenceWorker`."""

    def compute_ref_logprobs(self, batch: BatchFuture, *, temperature: float = 1.0) -> BatchFuture:
        """See `ReferenceWorker.compute_ref_logprobs`."""


class RewardCalls(Protocol):
    """Calls of `RewardWorker`."""

    def compute_reward(self, batch: BatchFuture, *, is_counted: bool = True) -> BatchFuture:
        """See `RewardWorker.compute_reward`."""

    def compute_named_reward(self, batch: BatchFuture, name: str) -> BatchFuture:
        """See `RewardWorker.compute_named_reward`."""

    def compute_metric(self, batch: BatchFuture) -> BatchFuture:
        """See `RewardWorker.compute_metric`."""


class CostCalls(Protocol):
    """Calls of `CostWorker`."""

    def compute_cost(self, batch: BatchFuture) -> BatchFuture:
        """See `CostWorker.compute_cost`."""

    def list_costs(self, batch: BatchFuture) -> ObjectFuture:
        """See `CostWorker.list_costs`."""


class AdvantageCalls(Protocol):
    """Calls of `AdvantageWorker`."""

    def compute_advantages(self, batch: BatchFuture, estimator: Estimator) -> BatchFuture:
        """See `AdvantageWorker.compute_advantages`."""

    def count_group_tokens(self, batch: BatchFuture, *, overlong_filter: bool = False) -> BatchFuture:
        """See `AdvantageWorker.count_group_tokens`."""

    def add_length_term(self, batch: BatchFuture, term: LengthTerm) -> BatchFuture:
        """See `AdvantageWorker.add_length_term`."""

    def measure_returns(self, batch: BatchFuture) -> ObjectFuture:
        """See `AdvantageWorker.measure_returns`."""

    def select_groups(self, batch: BatchFuture, metric: FilterMetric | None = None) -> ObjectFuture:
        """See `AdvantageWorker.select_groups`."""

    def compute_metrics(
        self, batch: BatchFuture, *, compares_sampler: bool = True, counts_responses: bool = True
    ) -> MetricsFuture:
        """See `AdvantageWorker.compute_metrics`."""


class PairScorerCalls(Protocol):
    """Calls of `PairScorer`, which trains a reward model."""

    def update_scores(self, batch: BatchFuture, loss: Loss) -> MetricsFuture:
        """See `PairScorer.update_scores`."""
