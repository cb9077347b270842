"""RLOO: the baseline of a response is the mean score of the others (Ahmadian et al. 2024).

Deviations from the paper:

- the KL penalty is a token reward, accumulated over what follows the token; the paper subtracts it from the score;
- a clipped token ratio allows several updates per batch; with one update it is plain REINFORCE;
- the logarithm of the ratio is cut at -20 and 20.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from hf_algorithms.recipes._config import AggregationMode, ClipKeys, Coefficient, GroupKeys, PolicyConfig, ScoreClipKeys
from hf_algorithms.recipes._recipe import Recipe, StepContext
from hf_algorithms.recipes._roles import POLICY_ROLES
from hf_algorithms.recipes._steps import build_clip, generate_scored, train_by_scores

if TYPE_CHECKING:
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture, MetricsFuture

__all__ = ["RLOO", "RLOOConfig", "step"]


class RLOOConfig(ScoreClipKeys, GroupKeys, ClipKeys, PolicyConfig):
    """`[algorithm]` with `name = "rloo"`."""

    name: Literal["rloo"] = "rloo"
    kl_coefficient: Coefficient = 0.05
    kl_place: Literal["reward", "loss", "none"] = "reward"
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    kl_return: Literal["token", "cumulative", "sequence"] = "cumulative"
    """A token pays its own KL, or that of all that follow; `sequence`: the score pays it, before the baseline."""
    ratio: Literal["token", "sequence"] = "token"
    """Ratio that is clipped: of each token, or of the whole response, which is their product."""
    aggregation: AggregationMode = "seq-mean-token-sum"

    def find_contradictions(self) -> Iterator[str]:
        """Yields one line for every pair of keys that cannot go together."""
        yield from super().find_contradictions()
        if self.ratio == "sequence" and self.dual_clip is not None:
            yield "algorithm.dual_clip: algorithm.ratio = 'sequence' has no dual clip. Remove it"
        if self.ratio == "sequence" and self.aggregation != "seq-mean-token-sum":
            yield (
                f"algorithm.ratio = 'sequence': with algorithm.aggregation = '{self.aggregation}' it is not the loss "
                "of whole responses. Use 'seq-mean-token-sum'"
            )


def step(roles: Roles, prompts: BatchFuture, config: RLOOConfig, context: StepContext) -> Sequence[MetricsFuture]:
    """One iteration; every line returns at once, and the data flows from worker to worker."""
    from hf_algorithms.advantages import GroupAdvantage
    from hf_algorithms.losses import SequenceProductClip

    batch = generate_scored(roles, prompts, context)
    estimator = GroupAdvantage(
        baseline="leave_one_out",
        scale="none",
        group_of_one=config.group_of_one,
        kl_coefficient=config.reward_kl_coefficient,
        kl_estimator=config.kl_estimator,
        kl_return=config.kl_return,
        score_clip=config.score_clip,
    )
    whole = SequenceProductClip(low=config.clip_low, high=config.clip_high)
    surrogate = build_clip(config) if config.ratio == "token" else whole
    return train_by_scores(roles, batch, config, context, estimator, surrogate)


RLOO = Recipe(name="rloo", config=RLOOConfig, roles=POLICY_ROLES, step=step)
