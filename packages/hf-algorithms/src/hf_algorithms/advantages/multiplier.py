"""The Lagrange multiplier of a constraint on the mean cost of a response. Pure: states go in and come out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, pvariance
from typing import Any, Literal, get_args

from hf_algorithms.advantages._columns import check_bound, check_choice, check_finite
from hf_protocols.arguments import check_count
from hf_protocols.errors import BatchError, ConfigError

__all__ = ["Multiplier"]

Space = Literal["log", "projected"]

_LARGEST = 1e6
"""No multiplier goes beyond: in log space it would pass every float within a few updates."""
_SATURATED = 99.0
"""From here on the cost has 99 % of the weight in (A_r - lambda A_c) / (1 + lambda): growth changes little."""
_WINDOWS = 4
"""Windows of costs above the limit after which the cost at full weight is extrapolated."""
_LEAST_GROWTH = 1e-6
"""Of the cost's weight between two windows: below it there is no slope to extrapolate."""


@dataclass(frozen=True, kw_only=True)
class Multiplier:
    """Dual ascent on lambda >= 0 for E[cost] <= limit (Safe RLHF, Dai et al. 2023).

    With C the mean cost of the last episodes and d the limit, `log` space does log lambda += learning_rate * lambda *
    (C - d), as Safe RLHF's code; `projected` does lambda = max(0, lambda + learning_rate * (C - d)). Both have the same
    fixed point, where C = d or lambda stands at a bound; the paths differ.

    Deviations from Safe RLHF's code: one update for a whole batch, not one for each micro-batch and rank; a batch
    larger than the window counts whole. The state is a dict of numbers and lists, so JSON can hold it.
    """

    space: Space = "log"
    init: float = 1.0
    """First lambda: above 0 in log space."""
    learning_rate: float = 0.1
    limit: float = 0.0
    """d, in the unit of the cost."""
    window: int = 128
    """C is the mean of this many last costs, or of the whole batch if that is larger."""
    maximum: float | None = None
    """Largest lambda; None: 1e6."""

    def __post_init__(self) -> None:
        check_choice("lambda_space", self.space, get_args(Space))
        check_bound("lambda_init", self.init, may_be_zero=self.space == "projected")
        check_bound("lambda_learning_rate", self.learning_rate)
        check_bound("lambda_max", self.maximum, may_be_zero=False, may_be_none=True)
        check_count(ConfigError, "cost_window", self.window)
        check_finite("cost_limit", self.limit)
        if self.init > self._bound:
            raise ConfigError(f"lambda_init={self.init} is above lambda_max={self._bound}. Lower the first.")

    @property
    def _bound(self) -> float:
        return _LARGEST if self.maximum is None else min(self.maximum, _LARGEST)

    def start(self) -> dict[str, Any]:
        """Returns the state before the first update.

        Its keys: `value`, lambda; `cost`, C of the last update or None; `costs`, the last episodes' costs, newest last;
        `weights`, the lambda / (1 + lambda) at which each was drawn; `above`, episodes since C was last at most the
        limit; `saturated`, those of them since lambda has been at its largest useful size (see `is_infeasible`).
        """
        return {"value": float(self.init), "cost": None, "costs": [], "weights": [], "above": 0, "saturated": 0}

    def update(self, state: Mapping[str, Any], costs: Iterable[float]) -> dict[str, Any]:
        """Returns the state after one batch of episodes; `state` stays as it was.

        Args:
            state: of `start` or an earlier `update`.
            costs: one number for each new episode, NaN where it is not known; a batch without any known cost changes
                nothing.

        Raises:
            BatchError: a cost is infinite.
        """
        fresh = [cost for cost in map(float, costs) if not math.isnan(cost)]
        for cost in fresh:
            if math.isinf(cost):
                raise BatchError(f"costs: {cost} is infinite. Find the function or model that computed it.")
        if not fresh:
            return {**state, "costs": list(state["costs"]), "weights": list(state["weights"])}
        kept = [*state["costs"], *fresh]
        mean = fmean(kept[-max(self.window, len(fresh)) :])
        drawn_at = float(state["value"])
        value = self._ascend(drawn_at, mean - self.limit)
        weights = [*state["weights"], *[drawn_at / (1.0 + drawn_at)] * len(fresh)]
        above = state["above"] + len(fresh) if mean > self.limit else 0
        at_end = above and value >= min(self._bound, _SATURATED)
        return {
            "value": value,
            "cost": mean,
            "costs": kept[-_WINDOWS * self.window :],
            "weights": weights[-_WINDOWS * self.window :],
            "above": above,
            "saturated": state["saturated"] + len(fresh) if at_end else 0,
        }

    def _ascend(self, value: float, excess: float) -> float:
        if self.space == "projected":
            return min(max(0.0, value + self.learning_rate * excess), self._bound)
        # a step beyond the bound ends there in any case, and exp of it may not be a float
        step = min(self.learning_rate * value * excess, math.log(self._bound / value))
        return max(value * math.exp(step), math.ulp(0.0))

    def is_infeasible(self, state: Mapping[str, Any]) -> bool:
        """Returns True if the constraint looks as if it could not be met under the KL penalty.

        As lambda grows, the best policy tends to ref * exp(-cost / kl_coefficient), not to the least cost. If the cost
        of that policy is above the limit, lambda grows for ever. Reported are two signs of it, each with C above the
        limit at every update meanwhile:

        - for a window of episodes lambda stood at `maximum`, or at 99 and more, where the cost has 99 % of the weight;
        - for four windows lambda grew, and the cost that a straight line through the oldest and the newest window gives
          at full weight, lambda / (1 + lambda) = 1, is above the limit by more than two standard errors.

        Signs, not a proof: a `maximum` that is too low, or a policy that learns much slower than lambda grows, look the
        same. Then raise `maximum`, or lower the learning rate of the multiplier. Otherwise lower `kl_coefficient` or
        raise the limit.
        """
        if state["saturated"] >= self.window:
            return True
        costs, weights = state["costs"], state["weights"]
        if min(state["above"], len(costs)) < _WINDOWS * self.window:
            return False
        oldest, newest = costs[: self.window], costs[-self.window :]
        weight = fmean(weights[-self.window :])
        growth = weight - fmean(weights[: self.window])
        if growth <= _LEAST_GROWTH:
            return False
        reach = (1.0 - weight) / growth
        at_full_weight = fmean(newest) + reach * (fmean(newest) - fmean(oldest))
        variance = (1.0 + reach) ** 2 * pvariance(newest) + reach**2 * pvariance(oldest)
        return at_full_weight - self.limit > 2.0 * math.sqrt(variance / self.window)
