"""Safe-RLHF, or PPO-Lagrangian: as helpful as possible while the expected cost stays below a limit (Dai et al. 2023).

Two critics estimate rewards and costs. A multiplier lambda weighs the advantages, (A_r - lambda A_c) / (1 + lambda),
and moves with the mean cost of the last responses, before the actor's updates. The KL penalty is in both signals, so
that its net weight does not depend on lambda. With `ptx_coefficient` the language-model loss on rows of
`data.pretraining` or `data.train` enters the actor's own optimizer step.

Deviations from the authors' code:

- costs come from a Python function, `[cost] function`, or a model, `[cost.model]`, above 0 for what is unwanted;
- lambda is updated once an iteration by the costs of the whole batch, not once a micro-batch and rank;
- both critics start from the actor; `[roles.critic] path` and `[roles.cost_critic] path` name the reward model and the
  cost model, from which the authors start;
- the logarithm of the policy's ratio is cut at -20 and 20;
- values are clipped as in PPO; the authors clip values to a distance of 5, which is `value_clip = 5.0`;
- the critics' loss is a mean over all tokens of a mini-batch, not over responses, and ignores `overlong_filter`;
- the gradient of PTX enters the optimizer step of the policy's loss; the authors pass backwards twice.

`constraint/infeasible` is 1 where lambda keeps growing, or stands at `lambda_max`, while the cost stays above the limit
and no longer falls: the constraint cannot be met under this KL penalty, which is not a divergence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from hf_algorithms.recipes._config import AggregationMode, ClipKeys, Coefficient, CriticKeys, PolicyConfig, Range
from hf_algorithms.recipes._critics import build_value_loss, compute_values, trains_actor
from hf_algorithms.recipes._recipe import Recipe, Role, StepContext
from hf_algorithms.recipes._roles import ACTOR, ADVANTAGE, COST_MODEL, CRITIC, REFERENCE, REWARD
from hf_algorithms.recipes._steps import (
    add_old_logprobs,
    add_ref_logprobs,
    build_clip,
    build_policy_loss,
    generate,
    mini_batches,
)

if TYPE_CHECKING:
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture, MetricsFuture

__all__ = ["COST", "COST_CRITIC", "SAFE_RLHF", "SafeRLHFConfig", "step"]

COST = Role(name="cost", worker="hf_algorithms.workers:CostWorker", scored_by=COST_MODEL)
COST_CRITIC = Role(name="cost_critic", worker=CRITIC.worker, has_model=True, starts_from="actor")

_SEQUENCE = ("prompt_ids", "response_ids", "response_mask")
_OF_COSTS = {"cost_values": "values", "cost_returns": "returns", "costs": "scores", "scores": "costs"}


class SafeRLHFConfig(CriticKeys, ClipKeys, PolicyConfig):
    """`[algorithm]` with `name = "safe_rlhf"`."""

    needs_keys: ClassVar[tuple[str, ...]] = ("cost.function",)

    name: Literal["safe_rlhf"] = "safe_rlhf"
    kl_coefficient: Coefficient = 0.02
    kl_place: Literal["reward"] = "reward"
    kl_estimator: Literal["k1"] = "k1"
    aggregation: AggregationMode = "seq-mean-token-mean"
    cost_limit: Annotated[float, Field(ge=-1e6, le=1e6)] = 0.0
    """Expected cost of a response that is allowed."""
    cost_window: Annotated[int, Field(ge=1)] = 128
    """Responses over which the cost is averaged."""
    lambda_space: Literal["log", "projected"] = "log"
    """Quantity that the update moves: the logarithm of lambda, or lambda itself, cut at 0."""
    lambda_init: Coefficient = 1.0
    """Lambda before the first update; 0 only where `lambda_space = "projected"`."""
    lambda_learning_rate: Coefficient = 0.1
    """`projected`: lambda moves by this times (cost - limit). `log`: its logarithm moves by lambda times that."""
    lambda_max: Range | None = None
    """Largest lambda; by default a million."""
    ptx_coefficient: Coefficient = 0.0
    """Weight of the language-model loss on as many rows of `data.pretraining`, or else of `data.train`, as there are
    responses.
    """

    def find_contradictions(self) -> Iterator[str]:
        """Yields one line for every pair of keys that cannot go together."""
        yield from super().find_contradictions()
        if self.lambda_init == 0 and self.lambda_space == "log":
            yield "algorithm.lambda_init = 0: algorithm.lambda_space = 'log' never leaves it. Use 'projected'"
        if self.lambda_max is not None and self.lambda_init > self.lambda_max:
            yield (
                f"algorithm.lambda_init = {self.lambda_init}: algorithm.lambda_max = {self.lambda_max} is below it. "
                "Lower the first, or raise the second"
            )


def step(roles: Roles, prompts: BatchFuture, config: SafeRLHFConfig, context: StepContext) -> Sequence[Any]:
    """One iteration; it waits for the costs, which move the multiplier, and for nothing else."""
    from hf_algorithms.advantages import LagrangianAdvantage

    trains_same = trains_actor(config, context) and not config.ptx_coefficient
    batch = add_old_logprobs(roles, generate(roles, prompts, context), config, context, trains_same=trains_same)
    batch = batch.union(compute_values(roles, batch, config, context))
    of_costs = compute_values(roles, batch, config, context, role="cost_critic")
    batch = batch.union(of_costs.rename({"values": "cost_values"}))
    batch = add_ref_logprobs(roles, batch, config, context)
    batch = batch.union(roles.reward.compute_reward(batch)).union(roles.cost.compute_cost(batch))
    context.note_scored(batch)
    constraint = _move_multiplier(context.read(roles.cost.list_costs(batch), while_tracing=[]), config, context)
    estimator = LagrangianAdvantage(
        multiplier=constraint["constraint/lambda"],
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        kl_coefficient=config.kl_coefficient,
        kl_estimator=config.kl_estimator,
        bootstrap=config.bootstrap,
    )
    batch = batch.union(roles.advantage.compute_advantages(batch, estimator))
    metrics = roles.advantage.compute_metrics(batch, compares_sampler=config.old_source != "sampled")
    return [metrics, constraint, *_update(roles, batch, config, context)]


def _move_multiplier(costs: Sequence[float], config: SafeRLHFConfig, context: StepContext) -> dict[str, float]:
    """Moves lambda by the costs of the batch, which is kept in `context.state`; returns the constraint's metrics.

    While the critics warm up the policy cannot answer: lambda stays, and the window of costs fills.
    """
    from hf_algorithms.advantages import Multiplier

    multiplier = Multiplier(
        space=config.lambda_space,
        init=config.lambda_init,
        learning_rate=config.lambda_learning_rate,
        limit=config.cost_limit,
        window=config.cost_window,
        maximum=config.lambda_max,
    )
    before = context.state.get("multiplier", multiplier.start())
    state = multiplier.update(before, costs)
    if not trains_actor(config, context):
        state |= {"value": before["value"], "above": []}
    context.state["multiplier"] = state
    found = {
        "cost/unscorable": float(sum(map(math.isnan, costs))),
        "constraint/lambda": float(state["value"]),
        "constraint/infeasible": float(multiplier.is_infeasible(state)),
    }
    return found if state["cost"] is None else found | {"constraint/cost": float(state["cost"])}


def _update(roles: Roles, batch: BatchFuture, config: SafeRLHFConfig, context: StepContext) -> list[MetricsFuture]:
    """Updates both critics and the actor on every mini-batch."""
    sampling, metrics = context.sampling, []
    value_loss = build_value_loss(roles, batch, config, context)
    cost_loss = build_value_loss(roles, _read_costs(batch), config, context, role="cost_critic")
    policy_loss = build_policy_loss(config, build_clip(config), max_new_tokens=sampling.max_new_tokens)
    for rows in mini_batches(roles, batch, config, context):
        metrics.append(roles.critic.update_critic(rows, value_loss))
        metrics.append(roles.cost_critic.update_critic(_read_costs(rows), cost_loss))
        if not trains_actor(config, context):
            continue
        if config.ptx_coefficient:
            roles.actor.hold_pretraining(context.pretrain_rows(rows.num_rows))
        metrics.append(
            roles.actor.update_actor(
                rows, policy_loss, temperature=sampling.temperature, pretrain_weight=config.ptx_coefficient
            )
        )
    return metrics


def _read_costs(batch: BatchFuture) -> BatchFuture:
    """The batch as the cost critic reads it: costs are its rewards, and rewards its costs."""
    return batch.select([*_SEQUENCE, *_OF_COSTS]).rename(_OF_COSTS)


SAFE_RLHF = Recipe(
    name="safe_rlhf",
    config=SafeRLHFConfig,
    roles=(ACTOR, CRITIC, COST_CRITIC, REFERENCE, REWARD, COST, ADVANTAGE),
    step=step,
)
