"""Phases of an iteration, from spans written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hf_algorithms.run.phases import measure_phases
from hf_algorithms.workers import ActorWorker, AdvantageWorker, RewardWorker
from hf_controller import Span, TracingExecutor
from hf_controller.trace import SubSpan

WORKERS = {"actor": ActorWorker, "reward": RewardWorker, "advantage": AdvantageWorker}


def span(call_id: int, role: str, method: str, seconds: float, *, iteration: int = 2, **changes: Any) -> Span:
    times = {"submit_s": 0.0, "ready_s": 5.0, "fetched_s": 6.0, "computed_s": 6.0 + seconds, "end_s": 99.0}
    given: dict[str, Any] = {"pool": "p", "host": "h", "rank": 0, "bytes_read": 0, "bytes_written": 0, **times}
    return Span(call_id=call_id, role=role, method=method, labels={"iteration": iteration}, **(given | changes))


def test_calls_take_as_long_as_their_slowest_rank() -> None:
    reshard = (SubSpan("reshard", 6.0, 6.5), SubSpan("generate", 6.5, 9.0))
    spans = [
        span(1, "actor", "generate_sequences", 3.0, sub_spans=reshard),
        span(1, "actor", "generate_sequences", 2.0, sub_spans=reshard[1:], rank=1),
        span(2, "actor", "compute_logprobs", 1.0),
        span(3, "reward", "compute_reward", 0.25),
        span(4, "advantage", "compute_advantages", 0.125),
        span(5, "actor", "update_actor", 4.0),
        span(6, "actor", "update_actor", 5.0),
        span(7, "actor", "update_actor", 50.0, iteration=1),
        span(8, "stranger", "update_actor", 50.0),
    ]
    with TracingExecutor() as executor:
        groups = {role: executor.build_group(role, worker) for role, worker in WORKERS.items()}
        found = measure_phases(spans, groups, 2)
    assert found == pytest.approx(
        {
            "time/generate_s": 2.5,
            "time/sync_s": 0.5,
            "time/logprobs_s": 1.0,
            "time/score_s": 0.25,
            "time/advantages_s": 0.125,
            "time/train_s": 9.0,
        }
    )
