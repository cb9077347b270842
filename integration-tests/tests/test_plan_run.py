"""`train --plan`: pools and layouts come from the plan, on Ray; a plan that cannot be followed is one clear error."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hf_engine
from hf_algorithms import load_config
from hf_algorithms.preflight.inputs import load_inputs
from hf_algorithms.preflight.placement import plan_dataflow
from hf_engine import load_rollout_backend
from hf_engine.training import offload
from hf_mapper import ClusterSpec, MachineSpec, WorkloadSpec, gpu, map_dataflow
from hf_mapper.specs import SHIPPED_GENERATION
from hf_protocols import Dataflow, GenerationSpec, MachinePlan, MappingPlan, ModelPlan, ParallelSpec, PoolPlan
from small_runs import Outcome, read_metrics, read_samples, without_times

ON_RAY = ("run.executor=ray", "cluster.call_timeout_s=100")


def settings(*changes: str) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def two_pools() -> MappingPlan:
    """Actor and reference on two ranks, the critic on one."""
    pairs, alone = ParallelSpec(dp_size=2), ParallelSpec(dp_size=1)
    slots = {"policy": 2, "critic": 1, "reward": 1, "advantage": 1}
    fsdp = ModelPlan(pool="policy", backend="fsdp", train=pairs)
    return MappingPlan(
        pools=tuple(
            PoolPlan(name=name, machines=(MachinePlan(gpu_kind="cpu", slots=count),)) for name, count in slots.items()
        ),
        models={
            "actor": dataclasses.replace(fsdp, generation=GenerationSpec()),
            "critic": ModelPlan(pool="critic", backend="fsdp", train=alone),
            "reference": fsdp,
            "reward": ModelPlan(pool="reward", backend="function"),
            "advantage": ModelPlan(pool="advantage", backend="function"),
        },
    )


def test_the_mappers_default_is_the_largest_shipped_engine() -> None:
    """Read off the sources: the classes of engines that are not installed cannot be imported."""
    folder = Path(hf_engine.__file__).parent / "rollout"
    stated = re.compile(r"^    largest_generation: .* = GenerationSpec\((?:gen_tp_size=(\d+))?\)$", re.MULTILINE)
    sizes = [int(size or 1) for path in folder.rglob("*.py") for size in stated.findall(path.read_text())]
    assert sorted(sizes) == [1, 1, 8, 64]  # transformers and servers, SGLang, vLLM
    assert GenerationSpec(gen_pp_size=1, gen_tp_size=max(sizes)) == SHIPPED_GENERATION


@pytest.mark.slow
def test_offloaded_models_train_like_others(
    small_config: Path, hybridflow: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their memory is really given up between calls, though on a CPU; the metrics are the same bit for bit."""
    outcome = hybridflow("train", small_config)
    assert outcome.exit_code == 0, outcome.errors
    run = small_config.parent / "run"
    expected = without_times(read_metrics(run))
    plan = MappingPlan.from_json((run / "plan.json").read_text())
    models = {role: dataclasses.replace(model, offload=model.train is not None) for role, model in plan.models.items()}
    file = small_config.with_name("offloaded.json")
    file.write_text(dataclasses.replace(plan, models=models).to_json())
    freed: list[int] = []
    give_up = offload.OffloadedMemory.give_up
    monkeypatch.setattr(offload, "_is_on_host", lambda storage: False)
    monkeypatch.setattr(
        offload.OffloadedMemory, "give_up", lambda *given, **parts: freed.append(give_up(*given, **parts)) or freed[-1]
    )
    outcome = hybridflow("train", small_config, "--overwrite", "--plan", file)
    assert outcome.exit_code == 0, outcome.errors
    assert without_times(read_metrics(run)) == expected
    assert len([num_bytes for num_bytes in freed if num_bytes]) > 3 * len(expected), "once for each model and call"


@pytest.mark.slow  # another test's executor may live in the program of the fast ones
@pytest.mark.timeout(400)
def test_two_pools_of_different_layouts_train_like_one_rank(
    small_config: Path, hybridflow: Callable[..., Outcome], cluster_address: str
) -> None:
    """Samples depend on rows, not on ranks, and losses are means over all tokens: sums differ in their order only.

    The test set has fewer rows than the actor and the reference have ranks.
    """
    one_row = small_config.with_name("one.jsonl")
    one_row.write_text('{"prompt": "37+85=", "answer": "122"}\n')
    small_config.write_text(re.sub(r"(?m)^test = .*$", f'test = "{one_row}"', small_config.read_text()))
    outcome = hybridflow("train", small_config)
    assert outcome.exit_code == 0, outcome.errors
    run = small_config.parent / "run"
    expected = without_times(read_metrics(run))
    file = small_config.with_name("two.json")
    file.write_text(two_pools().to_json())
    changes = (*ON_RAY, f"cluster.address={cluster_address}", "cluster.gpus_per_machine=3")
    changes += (f"run.output_dir={run.parent / 'two'}",)
    outcome = hybridflow("train", small_config, *settings(*changes), "--plan", file)
    assert outcome.exit_code == 0, outcome.errors
    two = run.parent / "two"
    assert MappingPlan.from_json((two / "plan.json").read_text()) == two_pools()
    assert ranks_of_pools(two) == {"policy": {0, 1}, "critic": {0}, "reward": {0}, "advantage": {0}}
    found = without_times(read_metrics(two))
    assert [row.keys() for row in found] == [row.keys() for row in expected]
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, abs=2e-4, rel=1e-3)
    samples = [[read_samples(folder, when) for when in (0, len(found))] for folder in (run, two)]
    assert samples[0] == samples[1]
    assert [len(each) for each in samples[1]] == [1, 1]


def error_lines(outcome: Outcome) -> int:
    """Counts lines of the error output except the progress of writing a model, which begins with a carriage return."""
    return len([line for line in outcome.errors.splitlines() if line and not line.startswith("Writing model shards")])


def ranks_of_pools(run: Path) -> dict[str, set[int]]:
    """On which ranks of which pool calls ran, as the trace has it."""
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    found: dict[str, set[int]] = {}
    for event in events:
        if "pool" in event.get("args", {}):
            found.setdefault(event["args"]["pool"], set()).add(event["tid"])
    return found


def as_json(**changes: Any) -> str:
    return json.dumps({**json.loads(two_pools().to_json()), **changes})


def on_two_kinds() -> str:
    """The critic on another kind of device than the policy."""
    pools = json.loads(as_json())["pools"]
    pools[0]["machines"][0]["gpu_kind"], pools[1]["machines"][0]["gpu_kind"] = "h100", "a100-80"
    return as_json(pools=pools)


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        (as_json(), (), "wants 2 slots of cpu on a machine, the cluster has 1 x 1 cpu"),
        (as_json(), ("cluster.gpus_per_machine=2",), "want 2 + 1 = 3 slots, the cluster has 1 x 2 cpu = 2"),
        (as_json(), ("cluster.gpus_per_machine=3", "cluster.gpu=h100"), "slots of cpu on a machine"),
        (
            on_two_kinds(),
            ("cluster.gpus_per_machine=3", "cluster.gpu=h100"),
            "the plan's models are on h100 and a100-80",
        ),
        (as_json(schema_version=7), (), "schema_version 7, this release reads 1"),
        (as_json(pools=[]), (), "which is none of"),
        ("{", (), "not a mapping plan"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_one_error(
    small_config: Path, hybridflow: Callable[..., Outcome], text: str, changes: tuple[str, ...], message: str
) -> None:
    file = small_config.with_name("plan.json")
    file.write_text(text)
    outcome = hybridflow("train", small_config, *settings("run.executor=ray", *changes), "--plan", file)
    assert outcome.exit_code == 2, outcome.output
    assert message in outcome.errors
    assert error_lines(outcome) == 1
    assert not (small_config.parent / "run").exists(), "nothing was started"


def test_a_plan_for_other_roles_is_one_error(small_config: Path, hybridflow: Callable[..., Outcome]) -> None:
    body = json.loads(two_pools().to_json())
    body["models"]["judge"] = body["models"].pop("critic")
    file = small_config.with_name("plan.json")
    file.write_text(json.dumps(body))
    outcome = hybridflow("train", small_config, "--plan", file)
    assert outcome.exit_code == 2
    assert "has the roles actor, critic, reference, reward, advantage" in outcome.errors


def test_without_hf_mapper_a_plan_can_be_followed_but_not_made(
    small_config: Path, hybridflow: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = hybridflow("plan", small_config, "--json")
    file = small_config.with_name("plan.json")
    file.write_text(plan.output)
    for name in [name for name in sys.modules if name.partition(".")[0] == "hf_mapper"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Without("hf_mapper"), *sys.meta_path])
    for command in ("plan", "train"):
        outcome = hybridflow(command, small_config)
        assert outcome.exit_code == 2
        assert "not installed: pip install hf-mapper" in outcome.errors
        assert error_lines(outcome) == 1
    outcome = hybridflow("train", small_config, "--overwrite", "--plan", file)
    assert outcome.exit_code == 0, outcome.errors


class Without:
    """A finder that hides a package, as if it were not installed."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == self._package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_the_plan_in_the_guide_is_this_one() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "plan-and-train-by-a-plan.md"
    (block,) = re.findall(r"^```json\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    shown, trained = MappingPlan.from_json(block), two_pools()
    assert (shown.pools, dict(shown.models)) == (trained.pools, dict(trained.models))


def test_the_plan_is_the_mappers_for_the_published_dataflow(
    small_config: Path, hybridflow: Callable[..., Outcome], tmp_path: Path
) -> None:
    changes = ("run.executor=ray", "cluster.gpu=l40s", "cluster.gpus_per_machine=4", "algorithm.mini_batches=2")
    outcome = hybridflow("plan", small_config, "--json", *settings(*changes))
    assert outcome.exit_code == 0, outcome.errors
    config = load_config(small_config, changes)
    inputs = load_inputs(config, tmp_path)
    workload = WorkloadSpec(
        global_batch=8,
        prompt_tokens=inputs.train.max_prompt_tokens,
        response_tokens=5,
        mini_batches=2,
        dtype="float32",
        recompute="none",
        largest_generation=load_rollout_backend("transformers").largest_generation,
    )
    models = dict.fromkeys(("actor", "critic", "reference"), inputs.model.shape)
    machines = ClusterSpec(machines=(MachineSpec(gpu=gpu("l40s"), num_gpus=4),))
    found = MappingPlan.from_json(outcome.output)
    assert found == map_dataflow(plan_dataflow(config), models, machines, workload, backends=("fsdp",))
    # Workers read a few columns more than the published ones (the sampler's log-probs, to compare): some bytes more.
    published = map_dataflow(Dataflow.preset("ppo"), models, machines, workload, backends=("fsdp",))
    assert (found.pools, found.models) == (published.pools, published.models)
    assert found.estimates.iteration_s == pytest.approx(published.estimates.iteration_s, rel=1e-2)
