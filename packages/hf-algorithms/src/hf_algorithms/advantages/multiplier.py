"""The Lagrange multiplier of a constraint on the mean cost of a response. Pure: states go in and come out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, get_args

from hf_algorithms.advantages._columns import check_bound, check_finite
from hf_protocols.errors import BatchError, ConfigError
from hf_protocols.validation import Checks

__all__ = ["Multiplier"]

_check = Checks(ConfigError)

Space = Literal["log", "projected"]

_LARGEST = 1e6
"""Largest multiplier: beyond it, log space would leave the range of a float within a few updates."""
_SATURATED = 99.0
"""From here on the cost has 99 % of the weight in (A_r - lambda A_c) / (1 + lambda): growth changes little."""
_WINDOWS = 8
"""Windows of costs above the limit before the constraint is judged."""
_DOUBLED = 2.0
"""Growth of 1 + lambda that halves the reward's weight, 1 / (1 + lambda): it should have moved the cost."""
_SETTLED = 0.2
"""Share of the distance to the limit: a cost that moves by less between two halves of a stretch has settled."""
_MOST_STRETCHES = 64
"""Stretches that a state keeps; beyond, neighbours are joined."""


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
        _check.one_of("lambda_space", self.space, get_args(Space))
        check_bound("lambda_init", self.init, may_be_zero=self.space == "projected")
        check_bound("lambda_learning_rate", self.learning_rate)
        check_bound("lambda_max", self.maximum, may_be_zero=False, may_be_none=True)
        _check.count("cost_window", self.window)
        check_finite("cost_limit", self.limit)
        if self.init > self._bound:
            raise ConfigError(f"lambda_init={self.init} is above lambda_max={self._bound}. Lower the first.")

    @property
    def _bound(self) -> float:
        return _LARGEST if self.maximum is None else min(self.maximum, _LARGEST)

    def start(self) -> dict[str, Any]:
        """Returns the state before the first update.

        Its keys: `value`, lambda; `cost`, C of the last update or None; `costs`, the last `window` costs, newest last;
        `above`, the stretches of episodes since C was last at most the limit, oldest first. A stretch is `[episodes,
        sum of costs, sum of squared costs, lambda when it began]`.
        """
        return {"value": float(self.init), "cost": None, "costs": [], "above": []}

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
            return {**state, "costs": list(state["costs"]), "above": [list(each) for each in state["above"]]}
        kept = [*state["costs"], *fresh]
        mean = fmean(kept[-max(self.window, len(fresh)) :])
        drawn_at = float(state["value"])
        value = self._ascend(drawn_at, mean - self.limit)
        above: list[list[float]] = []
        if mean > self.limit:
            # distances from the limit: their squares keep the digits that the spread needs
            apart = [cost - self.limit for cost in fresh]
            newest = [float(len(fresh)), math.fsum(apart), _sum_squares(apart), drawn_at]
            above = _shorten([*(list(each) for each in state["above"]), newest])
        return {"value": value, "cost": mean, "costs": kept[-self.window :], "above": above}

    def _ascend(self, value: float, excess: float) -> float:
        if self.space == "projected":
            return min(max(0.0, value + self.learning_rate * excess), self._bound)
        # a step beyond the bound ends there in any case, and exp of it may not be a float
        step = min(self.learning_rate * value * excess, math.log(self._bound / value))
        return max(value * math.exp(step), math.ulp(0.0))

    def is_infeasible(self, state: Mapping[str, Any]) -> bool:
        """Returns True if the constraint looks as if it could not be met under the KL penalty.

        As lambda grows, the best policy tends to ref * exp(-cost / kl_coefficient), not to the least cost. If the cost
        of that policy is above the limit, lambda grows for ever. The result is True if there is a stretch of at least 8
        windows of episodes, up to now, with C above the limit at every update, in which:

        - lambda did its part: 1 + lambda doubled, or lambda stood at `maximum`, or at 99 and more, where the cost has
          99 % of the weight;
        - the cost has settled: the means of the older and the newer half differ, two standard errors included, by less
          than a fifth of the newest distance from the limit.

        So neither a falling cost is reported nor a rising one, as while a policy follows late. The result is a sign,
        not a proof: a `maximum` that is too low, or a policy that hardly learns, looks the same. Then raise `maximum`,
        or the policy's learning rate. Otherwise lower `kl_coefficient` or raise the limit.
        """
        above, now = state["above"], state["value"]
        if not above:
            return False
        newest = fmean(state["costs"]) - self.limit
        return any(
            (began >= min(self._bound, _SATURATED) or 1.0 + now >= _DOUBLED * (1.0 + began))
            and self._has_settled(above[start:], newest)
            for start, (_, _, _, began) in enumerate(above)
        )

    def _has_settled(self, stretches: Sequence[Sequence[float]], newest: float) -> bool:
        """True if the cost of long enough stretches keeps its distance from the limit."""
        num_episodes = sum(each[0] for each in stretches)
        if num_episodes < _WINDOWS * self.window:
            return False
        middle = 1
        while middle < len(stretches) and sum(each[0] for each in stretches[:middle]) < num_episodes / 2:
            middle += 1
        if middle == len(stretches):
            return False
        (older, older_error), (newer, newer_error) = map(_describe, (stretches[:middle], stretches[middle:]))
        change = abs(older - newer) + 2.0 * math.sqrt(older_error + newer_error)
        return change < _SETTLED * min(newer, newest)


def _describe(stretches: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The mean distance from the limit, and the square of its standard error."""
    count, total, squares = (math.fsum(column) for column in list(zip(*stretches, strict=True))[:3])
    mean = total / count
    return mean, max(squares / count - mean * mean, 0.0) / count


def _sum_squares(numbers: Sequence[float]) -> float:
    # a square that is not a float would stop a run whose costs are only absurd
    return math.fsum(min(abs(number), 1e150) ** 2 for number in numbers)


def _shorten(stretches: list[list[float]]) -> list[list[float]]:
    """Joins neighbours where there are too many stretches; each keeps the lambda at which its first part began."""
    if len(stretches) <= _MOST_STRETCHES:
        return stretches
    pairs = [stretches[place : place + 2] for place in range(0, len(stretches), 2)]
    return [[*(math.fsum(column) for column in list(zip(*pair, strict=True))[:3]), pair[0][3]] for pair in pairs]
