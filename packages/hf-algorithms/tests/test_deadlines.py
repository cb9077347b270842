"""Each phase of a run has its deadline, and messages name the key that sets it."""

from __future__ import annotations

import pytest

from hf_algorithms.config import parse_config
from hf_algorithms.run.deadlines import evaluation_deadline, list_deadlines
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


PHASES = ("start", "generate", "score", "logprobs", "train", "sync", "evaluate", "checkpoint")


@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_deadlines_are_seconds(value):
    with pytest.raises(ConfigError, match=r"deadlines\.train_s"):
        parse_config({**BODY, "deadlines": {"train_s": value}})
