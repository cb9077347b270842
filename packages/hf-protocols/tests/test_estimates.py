from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from hf_protocols import MappingPlan, PlanError, PlanEstimates, SearchEstimate, load_plan

GOLDEN = Path(__file__).parent / "golden" / "mapping_plan.json"


def change(path: tuple[str | int, ...], value: object) -> str:
    """The golden plan with one value of its estimates put in place of another."""
    body = json.loads(GOLDEN.read_text(encoding="utf-8"))
    inner: Any = body["estimates"]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(body)


def leave_out(*path: str | int) -> str:
    body = json.loads(GOLDEN.read_text(encoding="utf-8"))
    inner: Any = body["estimates"]
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return json.dumps(body)


def read(text: str) -> PlanEstimates:
    return MappingPlan.from_json(text).require_estimates()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("iteration_s",), "long", "iteration_s of the plan = 'long': it is not a number of at least 0"),
        (("iteration_s",), True, "iteration_s of the plan = True: it is not a number of at least 0"),
        (("iteration_s",), -1, "iteration_s of the plan = -1: it is not a number of at least 0"),
        (("stages",), {"calls": []}, r"stages of the plan = \{'calls': \[\]\}: it is not a list"),
        (("stages", 0, "calls"), 3, r"stages\[0\].calls of the plan = 3: it is not a list"),
        (("stages", 0, "calls"), "actor.update", r"stages\[0\].calls of the plan = 'actor.update': it is not a list"),
        (("stages", 0, "calls", 0), None, r"stages\[0\].calls\[0\] of the plan = None: it is not text"),
        (("stages", 1, "waits_for"), 2, r"stages\[1\].waits_for of the plan = 2: it is not text"),
        (("stages", 1), 2, r"stages\[1\] of the plan = 2: it is not an object"),
        (("pools", "main", "usable_bytes"), 0, "pools.main.usable_bytes of the plan = 0: it is not a number of at le"),
        (("pools", "main", "stage_s"), [1.0], r"pools.main.stage_s of the plan = \[1.0\]: it is not a list of 2 num"),
        (("pools", "main", "machines"), 1, "pools.main.machines of the plan = 1: it is not text"),
        (("models", "actor", "state_bytes"), 10**400, "models.actor.state_bytes of the plan = .*: it is not a number"),
        (("models", "actor", "host_bytes"), None, "models.actor.host_bytes of the plan = None: it is not a number"),
        (
            ("models", "actor", "generation_waves"),
            1.5,
            "models.actor.generation_waves of the plan = 1.5: it is not a w",
        ),
        (("models", "actor"), [], r"models.actor of the plan = \[\]: it is not an object"),
        (("idle_gpus",), 1.0, "idle_gpus of the plan = 1.0: it is not a whole number of at least 0"),
        (("search",), True, "search of the plan = True: it is not an object"),
        (("search", "complete"), 1, "search.complete of the plan = 1: it is not true or false"),
        (("search", "gap"), [], r"search.gap of the plan = \[\]: it is not a number"),
        (("search", "placements_tried"), 0.5, "search.placements_tried of the plan = 0.5: it is not a whole number"),
        (("largest_generation",), 8, "largest_generation of the plan = 8: it is not text"),
        (("adapters", "rank"), "4", "adapters.rank of the plan = '4': it is not a whole number"),
        (("adapters", "parameters", "actor"), -4, "adapters.parameters.actor of the plan = -4: it is not a whole"),
    ],
)
def test_a_damaged_value_is_named_with_its_place(path: tuple[str | int, ...], value: object, message: str) -> None:
    with pytest.raises(PlanError, match=rf"^estimates\.{message}.*\. Regenerate the plan$"):
        read(change(path, value))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (("extra",), "estimates of the plan has the key 'extra', which is none of iteration_s, stages, pools"),
        (("stages", 0, "name"), r"estimates\.stages\[0\] of the plan has the key 'name', which is none of calls, lat"),
        (("pools", "main", "gpus"), "estimates.pools.main of the plan has the key 'gpus'"),
        (("search", "tried"), "estimates.search of the plan has the key 'tried', which is none of complete, gap, pl"),
    ],
)
def test_an_unknown_key_is_named_with_its_place(path: tuple[str | int, ...], message: str) -> None:
    with pytest.raises(PlanError, match=rf"^{message}.*\. Regenerate the plan$"):
        read(change(path, 1))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (("idle_gpus",), r"estimates of the plan = \{.*: it is not an object with 'idle_gpus'"),
        (("stages", 0, "waits_for"), r"estimates\.stages\[0\] of the plan = .*: it is not an object with 'waits_for'"),
        (("adapters", "parameters"), r"estimates\.adapters of the plan = .*: it is not an object with 'parameters'"),
    ],
)
def test_a_missing_key_is_named(path: tuple[str | int, ...], message: str) -> None:
    with pytest.raises(PlanError, match=rf"^{message}\. Regenerate the plan$"):
        read(leave_out(*path))


def test_what_the_mapper_may_not_know_may_be_left_out() -> None:
    assert read(leave_out("search")).search == SearchEstimate(complete=True, gap=None, placements_tried=None)
    assert read(leave_out("search", "gap")).search.gap is None
    assert read(leave_out("pools", "main", "machines")).pools["main"].machines is None
    assert read(leave_out("largest_generation")).largest_generation is None
    assert read(leave_out("adapters")).adapters is None


def test_fields_that_are_none_are_absent_or_null() -> None:
    text = leave_out("adapters")
    body = MappingPlan.from_json(text).to_json()
    assert json.loads(body) == json.loads(text)
    assert json.loads(body)["estimates"]["stages"][1]["waits_for"] is None


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(change(("idle_gpus",), "few"))
    with pytest.raises(PlanError, match=r"^the plan \S*plan\.json: estimates\.idle_gpus .*\. Regenerate the plan$"):
        load_plan(file)


def test_estimates_do_not_share_what_was_given() -> None:
    given = read(GOLDEN.read_text(encoding="utf-8"))
    pools = dict(given.pools)
    held = PlanEstimates(iteration_s=1.0, stages=(), pools=pools, models={}, idle_gpus=0)
    before = copy.copy(held.pools)
    pools.clear()
    assert held.pools == before
