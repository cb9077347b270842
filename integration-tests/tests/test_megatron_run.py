"""PPO under Megatron's layouts on Ray is the run of FSDP in one process: same samples, same numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from small_runs import Outcome, read_metrics, without_times

SIZES = ("model.num_layers=2", "model.num_heads=2")


def on_two_ranks(plan: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    """All trained models in the actor's pool, which gets a second slot."""
    pool_name = plan["models"]["actor"]["pool"]
    for model in plan["models"].values():
        if model["train"] is not None:
            model.update(backend="megatron", pool=pool_name, train=model["train"] | sizes)
    used = {model["pool"] for model in plan["models"].values()}
    plan["pools"] = [pool for pool in plan["pools"] if pool["name"] in used]
    (pool,) = (pool for pool in plan["pools"] if pool["name"] == pool_name)
    pool["machines"][0]["slots"] = 2
    return plan


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"pp_size": 2}], ids=["tp", "pp"])
def test_a_run_is_the_same_under_another_layout(
    small_config: Path,
    hybridflow: Callable[..., Outcome],
    tmp_path: Path,
    cluster_address: str,
    sizes: dict[str, int],
) -> None:
    changed = [argument for size in SIZES for argument in ("--set", size)]
    outcome = hybridflow("train", small_config, *changed)
    assert outcome.exit_code == 0, outcome.errors
    expected = without_times(read_metrics(tmp_path / "run"))
    plan = on_two_ranks(json.loads((tmp_path / "run" / "plan.json").read_text()), sizes)
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    output = tmp_path / "megatron"
    changed += ["--set", f"run.output_dir={output}", "--set", "run.executor=ray", "--set", "training.backend=megatron"]
    changed += ["--set", "cluster.gpus_per_machine=2", "--set", f"cluster.address={cluster_address}"]
    outcome = hybridflow("train", small_config, *changed, "--plan", tmp_path / "plan.json")
    assert outcome.exit_code == 0, outcome.errors
    found = without_times(read_metrics(output))
    assert [row.keys() for row in found] == [row.keys() for row in expected]
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, abs=2e-4, rel=1e-3)
