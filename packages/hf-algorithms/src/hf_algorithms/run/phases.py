"""Seconds that an iteration spent in each phase, from the spans of its calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_controller import Span, WorkerGroup

__all__ = ["measure_phases"]

_PHASES = {"generation": "generate", "inference": "logprobs", "training": "train"}
"""By the kind of a method; a worker without a model names its own, as `phase`."""
_PARTS = {"reshard": "sync"}
"""Named parts of a call that are phases of their own, and not counted in the call's."""


def measure_phases(spans: Iterable[Span], groups: Mapping[str, WorkerGroup], iteration: int) -> dict[str, float]:
    """Returns `time/PHASE_s` of one iteration: generate, sync, logprobs, score, advantages, train, other.

    A call takes as long as its slowest rank is inside the method. Calls on different pools overlap, so the sum of all
    phases may be above the seconds of the iteration.

    Args:
        spans: of calls, which know their iteration by their labels; those of other iterations are left out.
        groups: the worker groups by role.
        iteration: from 1.
    """
    slowest: dict[tuple[int, str], float] = defaultdict(float)
    for span in spans:
        if span.labels.get("iteration") != iteration or span.role not in groups:
            continue
        parts = {_PARTS[each.name]: each.end_s - each.start_s for each in span.sub_spans if each.name in _PARTS}
        own = {_name_phase(groups[span.role], span.method): span.compute_s - sum(parts.values())}
        for phase, seconds in {**own, **parts}.items():
            slowest[span.call_id, phase] = max(slowest[span.call_id, phase], seconds)
    found: dict[str, float] = defaultdict(float)
    for (_, phase), seconds in slowest.items():
        found[f"time/{phase}_s"] += seconds
    return dict(sorted(found.items()))


def _name_phase(group: WorkerGroup, method: str) -> str:
    return _PHASES.get(group.methods[method].kind) or str(getattr(group.spec.worker, "phase", "other"))
