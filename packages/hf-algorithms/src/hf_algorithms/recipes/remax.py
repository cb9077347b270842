"""ReMax: the baseline of a response is the score of the greedy response to the same prompt (Li et al. 2024).

A second generation call makes the greedy responses; there is no critic (paper, Figure 6).

Deviations from the authors' code:

- no discount, and differences of scores are not cut; `gamma = 0.99` and `score_clip = 5.0` are the code's, which also
  multiplies the last token by `gamma`: `discounts_last = true`;
- all responses to a prompt share one greedy response;
- the loss is a mean over the tokens of the whole batch, not of each micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from hf_algorithms.recipes._config import ClipKeys, Coefficient, PolicyConfig, ScoreClipKeys, Share
from hf_algorithms.recipes._recipe import Recipe, StepContext
from hf_algorithms.recipes._roles import POLICY_ROLES
from hf_algorithms.recipes._steps import build_clip, generate_scored, score_uncounted, train_by_scores

if TYPE_CHECKING:
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture, MetricsFuture

__all__ = ["REMAX", "ReMaxConfig", "step"]


class ReMaxConfig(ScoreClipKeys, ClipKeys, PolicyConfig):
    """`[algorithm]` with `name = "remax"`."""

    name: Literal["remax"] = "remax"
    gamma: Share = 1.0
    """Discount per token."""
    discounts_last: bool = False
    """Multiplies the score at the last token by `gamma` too."""
    kl_coefficient: Coefficient = 0.05
    kl_place: Literal["reward", "loss", "none"] = "reward"
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    kl_return: Literal["token", "cumulative"] = "token"
    """`token`: a token pays its own KL (the authors' code); `cumulative`: that of all that follow (the gradient)."""
    ratio: Literal["none", "token"] = "none"
    """`none`: plain REINFORCE, for one update per iteration; `token`: PPO's clipped ratio (verl)."""

    def find_contradictions(self) -> Iterator[str]:
        """Yields one line for every pair of keys that cannot go together."""
        yield from super().find_contradictions()
        if self.ratio != "none":
            return
        for key in ("epochs", "mini_batches", "clip_low", "clip_high", "dual_clip"):
            if self.changes(key):
                reason = "takes one update per iteration" if key in ("epochs", "mini_batches") else "clips nothing"
                yield (
                    f"algorithm.{key} = {getattr(self, key)}: algorithm.ratio = 'none' {reason}. Use ratio = 'token', "
                    "or remove it"
                )


def step(roles: Roles, prompts: BatchFuture, config: ReMaxConfig, context: StepContext) -> Sequence[MetricsFuture]:
    """One iteration; every line returns at once, and the data flows from worker to worker."""
    from hf_algorithms.advantages import ReinforceAdvantage
    from hf_algorithms.losses import Reinforce

    batch = generate_scored(roles, prompts, context)
    greedy = replace(context.sampling, greedy=True, n=1, temperature=1.0)
    answers = prompts.union(roles.actor.generate_sequences(prompts, greedy))
    baseline = score_uncounted(roles, answers)
    batch = batch.union(baseline.rename({"scores": "baseline_scores"}).repeat(context.sampling.n))
    estimator = ReinforceAdvantage(
        gamma=config.gamma,
        discounts_last=config.discounts_last,
        baseline="greedy",
        score_clip=config.score_clip,
        kl_coefficient=config.reward_kl_coefficient,
        kl_estimator=config.kl_estimator,
        kl_return=config.kl_return,
    )
    return train_by_scores(
        roles, batch, config, context, estimator, Reinforce() if config.ratio == "none" else build_clip(config)
    )


REMAX = Recipe(name="remax", config=ReMaxConfig, roles=POLICY_ROLES, step=step)
