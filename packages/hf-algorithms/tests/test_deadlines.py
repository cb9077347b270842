"""Each phase of a run has its deadline, and messages name the key that sets it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hf_algorithms.config import parse_config
from hf_algorithms.run import evaluations
from hf_algorithms.run.deadlines import evaluation_deadline, list_deadlines
from hf_algorithms.workers import ModelWorker
from hf_controller import InProcessExecutor
from hf_protocols import ConfigError

BODY = {"data": {"train": "rows.jsonl"}}


def test_the_deadline_of_a_phase_defaults_to_that_of_a_call():
    found = list_deadlines(parse_config({**BODY, "cluster": {"call_timeout_s": 30.0}}))
    assert found["training"] == (30.0, "deadlines.train_s")
    assert found["*"] == (30.0, "cluster.call_timeout_s")
    assert found["__init__"] == (120.0, "deadlines.start_s")  # engines take their time


def test_a_phase_has_its_own_deadline():
    given = {f"{name}_s": float(number) for number, name in enumerate(PHASES, 1)}
    config = parse_config({**BODY, "deadlines": given})
    found = [*list_deadlines(config).values(), evaluation_deadline(config)]
    told = {deadline.key: deadline.seconds for deadline in found}
    assert told == {"cluster.call_timeout_s": 600.0} | {f"deadlines.{key}": value for key, value in given.items()}


def test_what_writes_or_reads_weights_has_one_deadline() -> None:
    found = list_deadlines(parse_config({**BODY, "deadlines": {"checkpoint_s": 7.0}}))
    methods = [name for name in vars(ModelWorker) if name.partition("_")[0] in ("save", "finish", "load", "export")]
    assert {"save_state", "finish_state"} <= set(methods)
    others = {name: found.get(name) for name in methods if name != "load_model"}
    assert others == dict.fromkeys(others, (7.0, "deadlines.checkpoint_s"))


PHASES = ("start", "generate", "score", "logprobs", "train", "sync", "evaluate", "checkpoint")


@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_deadlines_are_seconds(value):
    with pytest.raises(ConfigError, match=r"deadlines\.train_s"):
        parse_config({**BODY, "deadlines": {"train_s": value}})


def test_a_set_has_the_deadline_of_evaluations(monkeypatch):
    config = parse_config({**BODY, "deadlines": {"evaluate_s": 7.0}})
    held = []

    def evaluate_set(*_: Any, executor: Any, **__: Any) -> Any:
        held.append(executor._phase_deadline)
        return SimpleNamespace(to_metrics=dict)

    monkeypatch.setattr(evaluations, "evaluate_set", evaluate_set)
    monkeypatch.setattr(evaluations.RunEvaluations, "_find_scorer", lambda *_: None)
    due = SimpleNamespace(
        config=SimpleNamespace(name="test", every=None), data=None, build_sampling=lambda *_, **__: None
    )
    inputs = SimpleNamespace(evaluations=[due], turns=None, stop_ids=())
    with InProcessExecutor() as executor:
        roles = SimpleNamespace(having=lambda method: None)
        evaluations.RunEvaluations(config, inputs, executor, roles).evaluate_due(1, is_last=True)
    assert held == [(7.0, "deadlines.evaluate_s")]
