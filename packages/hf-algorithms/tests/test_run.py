"""Settings that a run passes to its executor, and its warnings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import hf_controller
from hf_algorithms.config import parse_config
from hf_algorithms.run import loop
from hf_algorithms.run.deadlines import list_deadlines
from hf_algorithms.run.step_metrics import describe_unscorable
from hf_protocols import ConfigError


@pytest.mark.parametrize(("call_timeout_s", "longest_s"), [(600.0, 600.0), (5.0, 120.0)])
def test_start_timeout_is_at_least_that_of_calls_and_two_minutes(
    call_timeout_s: float, longest_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their constructors load models and engines; a short deadline of calls is not a deadline for that."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(hf_controller, "RayExecutor", lambda **options: given.update(options))
    cluster = {"address": "local", "call_timeout_s": call_timeout_s}
    config = parse_config({"data": {"train": "rows.jsonl"}, "cluster": cluster})
    plan: Any = SimpleNamespace(pools=[SimpleNamespace(num_slots=2), SimpleNamespace(num_slots=1)])
    loop.build_executor(config, plan)
    assert given == {
        "num_cpus": 3,
        "address": "local",
        "object_store_bytes": None,
        "call_timeout_s": call_timeout_s,
        "start_timeout_s": longest_s,
        "deadlines": list_deadlines(config),
    }


def test_the_size_of_the_object_store_reaches_the_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(hf_controller, "RayExecutor", lambda **options: given.update(options))
    config = parse_config({"data": {"train": "rows.jsonl"}, "cluster": {"object_store_bytes": 100 << 20}})
    loop.build_executor(config, SimpleNamespace(pools=[SimpleNamespace(num_slots=2)]))  # type: ignore[arg-type]
    assert given["object_store_bytes"] == 100 << 20


def test_the_executor_in_process_has_the_deadline_of_a_call() -> None:
    """In which calls of other threads, such as those of an evaluation, have to end."""
    config = parse_config(
        {"data": {"train": "rows.jsonl"}, "run": {"executor": "in_process"}, "cluster": {"call_timeout_s": 7.0}}
    )
    with loop.build_executor(config, SimpleNamespace(pools=[])) as executor:  # type: ignore[arg-type]
        assert executor.call_timeout_s == 7.0


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"object_store_bytes": 0}, "cluster.object_store_bytes"),
        ({"object_store_bytes": 1e9}, "cluster.object_store_bytes"),
        ({"object_store_bytes": 1 << 30, "address": "auto"}, "cluster.address = 'auto' is a cluster that has its own"),
    ],
)
def test_a_wrong_object_store_names_its_key(cluster: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config({"data": {"train": "rows.jsonl"}, "cluster": cluster})


def test_a_reward_without_scores_names_its_functions() -> None:
    ended = describe_unscorable(3, {"reward/slow/failed": 8.0, "reward/quick/failed": 0.0, "reward/unscorable": 8.0})
    assert ended.endswith("could be scored: calls of slow (8 responses) met deadline_s or ended their process")
    assert describe_unscorable(3, {"reward/unscorable": 8.0}).endswith(": its functions returned None or NaN")
