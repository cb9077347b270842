"""Reasons for a plan: the other placement classes, its bottlenecks, the gain from more, and its tolerance to errors."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from hf_mapper.config import MapperConfig
from hf_mapper.explain.alternatives import Alternative, compare_classes
from hf_mapper.explain.bottlenecks import Bottleneck, Extension, find_bottleneck, try_extensions
from hf_mapper.explain.memory_tolerance import MemoryTolerance, compute_memory_tolerance
from hf_mapper.explain.robustness import Tolerance, compute_tolerances
from hf_mapper.search.exact_search import StopSign, find_pools
from hf_protocols import MappingPlan

__all__ = ["Explanation", "explain_plan"]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The best plan of a problem with its reasons.

    `alternatives` has every placement class, the chosen one first; `extensions` one entry for each kind of machine
    (empty where the cluster states no network); `tolerances` one for each simulator of seconds that the plan depends
    on, `memory` that of bytes (empty and None if not requested, or if their search was stopped).
    `complete`: the search was not stopped; otherwise plan and reasons are those found before.
    """

    plan: MappingPlan
    alternatives: tuple[Alternative, ...]
    bottleneck: Bottleneck
    extensions: tuple[Extension, ...]
    tolerances: tuple[Tolerance, ...]
    memory: MemoryTolerance | None
    complete: bool

    def to_json(self) -> str:
        """Returns one JSON object, ending in a newline; `MappingPlan.from_json` reads its `plan`."""
        body: dict[str, Any] = {
            "plan": json.loads(self.plan.to_json()),
            "alternatives": [asdict(entry) for entry in self.alternatives],
            "bottleneck": asdict(self.bottleneck),
            "extensions": [asdict(entry) for entry in self.extensions],
            "tolerances": [asdict(entry) | {"largest_error": entry.largest_error} for entry in self.tolerances],
            "memory": self.memory and asdict(self.memory) | {"largest_error": self.memory.largest_error},
            "complete": self.complete,
        }
        return json.dumps(body, indent=2, allow_nan=False) + "\n"


def explain_plan(problem: MapperConfig, should_stop: StopSign | None = None, *, robustness: bool = True) -> Explanation:
    """Finds the best plan of `problem` and its reasons; `robustness` takes one or two hundred more searches.

    `should_stop` is called as in `map_dataflow`. When it returns True, the result is the best plan so far with its
    bottleneck, and those of the other reasons that are certain.

    Raises:
        PlanError, ConfigError: as `map_dataflow`.
    """
    sign = _Remembered(should_stop or (lambda: False))
    plan, pools = find_pools(problem, sign)
    estimates = plan.require_estimates()
    return Explanation(
        plan=plan,
        alternatives=compare_classes(problem, pools, sign, complete=estimates.search.complete),
        bottleneck=find_bottleneck(problem, pools),
        extensions=try_extensions(problem, estimates.iteration_s, sign),
        tolerances=compute_tolerances(problem, pools, sign) if robustness else (),
        memory=compute_memory_tolerance(problem, pools, sign) if robustness else None,
        complete=not sign.given,
    )


class _Remembered:
    """A stop sign that stays True after its first True."""

    def __init__(self, ask: StopSign) -> None:
        self._ask = ask
        self.given = False

    def __call__(self) -> bool:
        self.given = self.given or self._ask()
        return self.given
