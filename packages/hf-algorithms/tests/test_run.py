"""What a run asks of its executor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hf_algorithms import run


@pytest.mark.parametrize(("call_timeout_s", "longest_s"), [(600.0, 600.0), (5.0, 120.0)])
def test_workers_may_start_and_wait_for_each_other_as_long_as_a_call_may_take(
    call_timeout_s: float, longest_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their constructors load models and engines; a short deadline of calls is no deadline for that."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(run, "RayExecutor", lambda **options: given.update(options))
    cluster = SimpleNamespace(address="local", call_timeout_s=call_timeout_s)
    config: Any = SimpleNamespace(run=SimpleNamespace(executor="ray"), cluster=cluster)
    plan: Any = SimpleNamespace(pools=[SimpleNamespace(num_slots=2), SimpleNamespace(num_slots=1)])
    run._build_executor(config, plan)
    assert given == {
        "num_cpus": 3,
        "address": "local",
        "call_timeout_s": call_timeout_s,
        "start_timeout_s": longest_s,
        "collective_timeout_s": longest_s,
    }
