"""The warm start of a run: the policy learns the reference answers before the algorithm starts.

It has the loss of `hybridflow sft`, AdamW and a constant learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hf_protocols import HybridFlowError

if TYPE_CHECKING:
    from hf_algorithms.config import WarmStartConfig
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture

__all__ = ["WarmStartError", "warm_start"]


class WarmStartError(HybridFlowError):
    """Supervised training that never reached its mark, or ran past it."""


def warm_start(
    roles: Roles,
    batches: Iterator[BatchFuture],
    evaluate: Callable[[], float],
    config: WarmStartConfig,
    *,
    metric: str,
    note: Callable[[str], None],
    first: int = 1,
    end_step: Callable[[int], None] = lambda step: None,
) -> int:
    """Trains until an evaluation reaches `config.stop_at`, or for `config.max_steps` steps.

    Args:
        roles: the one that generates is trained.
        batches: supervised rows, one batch a step.
        evaluate: scores the policy as it is.
        config: when to evaluate and when to stop.
        metric: name of what `evaluate` measures, for notes.
        note: takes one line for each evaluation.
        first: number of the first step; later than 1 where earlier ones are done.
        end_step: called after each step that is not the last.

    Returns:
        The number of steps taken, earlier ones included.

    Raises:
        WarmStartError: if `stop_at` is never reached, or the evaluation that reaches it is above `fail_above`.
    """
    from hf_algorithms.losses import SupervisedLoss

    policy = roles.having("generate_sequences")
    for step in range(first, config.max_steps + 1):
        metrics = policy.update_actor(next(batches), SupervisedLoss())
        if step % config.eval_every == 0 or step == config.max_steps:
            score = evaluate()
            note(f"warm start, step {step}: loss {metrics.result()['supervised/loss']:.3f}, {metric} {score:.3f}")
            if config.stop_at is not None and score >= config.stop_at:
                if score > config.fail_above:
                    raise WarmStartError(
                        f"the warm start jumped to {score:.3f}, above warm_start.fail_above={config.fail_above}. Lower "
                        f"warm_start.eval_every={config.eval_every} or warm_start.learning_rate={config.learning_rate}"
                    )
                return step
        end_step(step)
    if config.stop_at is not None:
        raise WarmStartError(
            f"no evaluation reached warm_start.stop_at={config.stop_at} within "
            f"warm_start.max_steps={config.max_steps}. Raise max_steps or warm_start.learning_rate"
        )
    return config.max_steps
