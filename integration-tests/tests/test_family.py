"""Every shipped algorithm runs and is placed, and two ranks on Ray do what one rank in this process does."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from algorithm_agreement import Sampled, build_body, compare, make_teacher, run_once

from hf_algorithms.config import format_toml, parse_config
from hf_algorithms.recipes import RECIPES
from hf_engine.training.fsdp import FsdpBackend
from hf_protocols import Dataflow
from small_runs import Outcome

ON_RAY = ("ppo", "grpo")
"""A critic, and groups; the others are `slow` on Ray."""


@pytest.fixture(scope="module")
def teacher(addition_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_teacher(tmp_path_factory.mktemp("teacher"), addition_data)


@pytest.fixture(scope="module")
def in_process(
    addition_data: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Sampled]:
    """Samples and metrics of one rank in this process; each algorithm runs once."""
    found: dict[str, Sampled] = {}

    def run(name: str) -> Sampled:
        if name not in found:
            output = tmp_path_factory.mktemp(name) / "run"
            found[name] = run_once(build_body(name, addition_data, output, teacher=teacher, on_ray=False))
        return found[name]

    return run


@pytest.mark.parametrize("name", RECIPES)
def test_an_algorithm_trains_in_process(name: str, in_process: Callable[[str], Sampled]) -> None:
    found = in_process(name)
    assert all(math.isfinite(value) for value in found.metrics.values()), found.metrics
    assert found.metrics["actor/grad_norm"] > 0
    num_rows = 8 * RECIPES[name].config.least_samples
    assert len(found.tokens[0]) == num_rows
    assert {"reward/mean", "response/tokens", "response/truncated"} <= found.metrics.keys()
    if name != "online_dpo":  # whose loss is of pairs, not of tokens
        assert found.metrics["actor/entropy"] > 0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ON_RAY else [pytest.mark.slow]) for name in RECIPES]
)
def test_two_ranks_on_ray_agree_with_one_in_process(
    name: str,
    in_process: Callable[[str], Sampled],
    addition_data: Path,
    teacher: Path,
    tmp_path: Path,
    cluster_address: str,
) -> None:
    output = tmp_path / "run"
    body = build_body(name, addition_data, output, teacher=teacher, on_ray=True, address=cluster_address)
    compare(in_process(name), run_once(body))
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert {
        plan["models"][role]["train"]["dp_size"] for role in RECIPES[name].model_roles if role in plan["models"]
    } == {2}


def build_top_k(data: Path, output: Path, teacher: Path, **on: Any) -> dict[str, Any]:
    body = build_body("distillation", data, output, teacher=teacher, **on)
    body["algorithm"] |= {"signal": "top_k", "top_k": 4, "mini_batches": 2}
    return body


def test_a_teachers_likeliest_tokens_train_in_process(addition_data: Path, teacher: Path, tmp_path: Path) -> None:
    found = run_once(build_top_k(addition_data, tmp_path / "run", teacher, on_ray=False)).metrics
    assert found["distillation/kl"] > 0
    assert 0 < found["distillation/rest"] < 1
    assert found["actor/grad_norm"] > 0


@pytest.mark.slow
def test_a_teachers_likeliest_tokens_train_alike_on_two_ranks(
    addition_data: Path, teacher: Path, tmp_path: Path, cluster_address: str
) -> None:
    one = run_once(build_top_k(addition_data, tmp_path / "one", teacher, on_ray=False))
    two = build_top_k(addition_data, tmp_path / "two", teacher, on_ray=True, address=cluster_address)
    compare(one, run_once(two))


@pytest.mark.slow
def test_an_entropy_bonus_trains_alike_on_two_ranks(addition_data: Path, tmp_path: Path, cluster_address: str) -> None:
    found = []
    for name, on_ray in (("one", False), ("two", True)):
        output = tmp_path / name
        body = build_body("grpo", addition_data, output, teacher=None, on_ray=on_ray, address=cluster_address)
        body["algorithm"] |= {"entropy_coefficient": 0.5}
        found.append(run_once(body))
    compare(*found)
    assert found[0].metrics["actor/entropy"] > 0


KEEPING = {
    "ppo": ("ppo", ["lm", "value"], {}),
    "as trl": ("ppo", ["value"], {"conventions": "trl", "old_logprobs": "sampled"}),
    "two mini-batches": ("ppo", [], {"mini_batches": 2}),
    "warm-up": ("ppo", ["value"], {"critic_warmup": 1}),
    "safe_rlhf": ("safe_rlhf", ["lm", "value", "value"], {}),
    "ptx": ("safe_rlhf", ["value", "value"], {"ptx_coefficient": 0.1}),
    "grpo": ("grpo", ["lm"], {"old_logprobs": "recomputed", "entropy_coefficient": 0.5}),
    "online_dpo": ("online_dpo", ["lm", "lm"], {"mini_batches": 2}),
}
"""Algorithm, heads of the models whose updates go on from an earlier pass, sorted, and keys."""


@pytest.mark.parametrize("case", KEEPING)
def test_updates_that_go_on_from_a_pass_change_nothing(case: str, addition_data: Path, tmp_path: Path) -> None:
    name, heads, keys = KEEPING[case]
    taken: list[str] = []
    take = FsdpBackend._take_kept

    def note(backend: FsdpBackend, *arguments: Any) -> Any:
        found = take(backend, *arguments)
        if found is not None:
            taken.append(backend._head)
        return found

    found = []
    for output, may_keep in (("kept", FsdpBackend._may_keep), ("again", lambda *_: False)):
        body = build_body(name, addition_data, tmp_path / output, teacher=None, on_ray=False)
        body["algorithm"] |= keys
        with mock.patch.multiple(FsdpBackend, _take_kept=note, _may_keep=may_keep):
            found.append(run_once(body))
    compare(*found)
    assert sorted(taken) == heads


@pytest.mark.parametrize("name", RECIPES)
def test_the_mapper_places_an_algorithm(
    name: str, hybridflow: Callable[..., Outcome], addition_data: Path, teacher: Path, tmp_path: Path
) -> None:
    body = build_body(name, addition_data, tmp_path / "run", teacher=teacher, on_ray=True)
    path = tmp_path / "config.toml"
    path.write_text(format_toml(parse_config(body)))
    outcome = hybridflow("plan", path, "--json")
    assert outcome.exit_code == 0, outcome.errors
    plan = json.loads(outcome.output)
    slots = sum(machine["slots"] for pool in plan["pools"] for machine in pool["machines"] if _holds_model(plan, pool))
    assert 1 <= slots <= 2
    assert set(plan["models"]) <= {role.name for role in RECIPES[name].roles}
    assert set(plan["models"]) >= set(Dataflow.preset(name).roles)


def _holds_model(plan: dict[str, dict[str, dict[str, object]]], pool: dict[str, str]) -> bool:
    return any(model["train"] is not None for model in plan["models"].values() if model["pool"] == pool["name"])
