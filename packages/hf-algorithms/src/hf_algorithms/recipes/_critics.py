"""Parts of a step with a critic: its values, its unit, and its loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_algorithms.recipes._recipe import StepContext

if TYPE_CHECKING:
    from hf_algorithms.losses import ValueLoss
    from hf_algorithms.recipes._config import CriticKeys
    from hf_algorithms.roles import Roles
    from hf_algorithms.workers.calls import CriticCalls
    from hf_controller import BatchFuture

__all__ = ["build_value_loss", "compute_values", "trains_actor"]


def compute_values(
    roles: Roles, batch: BatchFuture, config: CriticKeys, context: StepContext, role: str = "critic"
) -> BatchFuture:
    """Returns `values` of a critic, in the unit of rewards; with `reward_position = "after"` also `next_values`."""
    critic: CriticCalls = getattr(roles, role)
    options: dict[str, Any] = {"keep_graph": config.updates_at_once}
    if config.normalize_values:
        from hf_algorithms.value_scale import ValueScale

        options["scale"] = ValueScale.of(context.state.get(_key(role)))
    if getattr(config, "reward_position", "last") == "after":
        return critic.compute_values_after(batch, max_tokens=context.sampling.max_new_tokens, **options)
    return critic.compute_values(batch, **options)


def build_value_loss(
    roles: Roles, batch: BatchFuture, config: CriticKeys, context: StepContext, role: str = "critic"
) -> ValueLoss:
    """Returns the loss of a critic; with `normalize_values` in its own unit, to which this batch's returns are added.

    Then it waits for the returns. The unit is in `context.state`, one for all ranks and mini-batches of the iteration.

    Args:
        roles: of the step.
        batch: has `returns` of this critic.
        config: of the algorithm.
        context: of the step.
        role: name of the critic.
    """
    from hf_algorithms.losses import ValueLoss

    if not config.normalize_values:
        return ValueLoss(clip=config.value_clip)
    from hf_algorithms.value_scale import ValueScale, add_returns

    before = context.state.get(_key(role))
    fresh = context.read(
        roles.advantage.measure_returns(batch), while_tracing={"count": 0.0, "mean": 0.0, "squares": 0.0}
    )
    after = add_returns(before, fresh)
    context.state[_key(role)] = after
    return ValueLoss(clip=config.value_clip, scale=ValueScale.of(after), old_scale=ValueScale.of(before))


def trains_actor(config: CriticKeys, context: StepContext) -> bool:
    """Returns False in the iterations in which the critic warms up."""
    return not 0 < context.iteration <= config.critic_warmup


def _key(role: str) -> str:
    return f"{role}.returns"
