"""A value of ten thousand characters is cut in every message that shows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_algorithms.config import load_config, parse_config
from hf_algorithms.data import load_rows
from hf_algorithms.preflight.placement import check_rollout_options
from hf_algorithms.rewards import FunctionSpec, Samples, ScoringFunctions, load_function
from hf_controller import InProcessExecutor, ResourcePool, WorkerSpec
from hf_engine import fsdp_layout, load_rollout_backend, load_train_backend, replicated_layout
from hf_engine.resharding.tensor_checks import check_weights
from hf_mapper import WorkloadSpec, gpu, read_config
from hf_protocols import (
    Dataflow,
    HybridFlowError,
    MappingPlan,
    ModelShape,
    ParallelSpec,
    RowSelection,
    Topology,
    register,
    route,
    split_rows,
)

LONG = "x" * 10_000
DATA = {"data": {"train": "rows.jsonl"}}
MAPPER = (
    'dataflow = "ppo"\n[models]\nactor = "qwen2.5-0.5b"\n[cluster]\n[[cluster.machines]]\ngpu = "l40s"\nnum_gpus = 4\n'
)


def on_file(read: Callable[[Path], Any], text: str) -> Callable[[Path], Any]:
    def call(folder: Path) -> Any:
        (folder / "file").write_text(text)
        return read(folder / "file")

    return call


def with_plan(**changes: object) -> str:
    return json.dumps({"schema_version": 1, "pools": [], "models": {}, "estimates": {}} | changes)


def score_long() -> object:
    functions = ScoringFunctions([FunctionSpec(name="f", function=lambda responses: [LONG])], num_processes=0)
    return functions.score(Samples(prompts=[LONG], responses=[LONG], answers=[LONG]))


CALLS: dict[str, Callable[[Path], Any]] = {
    "key": lambda _: parse_config({LONG: 1}),
    "nested key": lambda _: parse_config({"run": {LONG: 1}}),
    "number": lambda _: parse_config({**DATA, "run": {"seed": LONG}}),
    "choice": lambda _: parse_config({**DATA, "run": {"executor": LONG}}),
    "list": lambda _: parse_config({**DATA, "run": {"seed": [LONG] * 100}}),
    "path": lambda _: parse_config({**DATA, "run": {"output_dir": LONG}}),
    "option": lambda _: parse_config({**DATA, "rollout": {"options": {LONG: float("inf")}}}),
    "option value": lambda _: check_rollout_options(
        parse_config({**DATA, "rollout": {"options": {"cache_bytes": LONG}}}).rollout
    ),
    "override": on_file(lambda file: load_config(file, [LONG]), ""),
    "override value": on_file(lambda file: load_config(file, [f"run.seed.{LONG}.a=1", "run.seed=1"]), "[run]\nseed=1"),
    "data line": on_file(load_rows, '{"prompt": ' + LONG),
    "data field": on_file(load_rows, json.dumps({f"{LONG}{index}": 1 for index in range(50)})),
    "reward": lambda _: load_function(LONG),
    "reward module": lambda _: load_function(f"{LONG}:f"),
    "reward function": lambda _: load_function(f"hf_algorithms.rewards:{LONG}"),
    "reward score": lambda _: score_long(),
    "plan text": lambda _: MappingPlan.from_json(LONG),
    "plan key": lambda _: MappingPlan.from_json(with_plan(**{LONG: 1})),
    "plan role": lambda _: MappingPlan.from_json(with_plan(models={LONG: {"pool": LONG}})),
    "plan pools": lambda _: MappingPlan.from_json(with_plan(pools=LONG)),
    "dataflow": lambda _: Dataflow.preset(LONG),
    "preset": lambda _: ModelShape.preset(LONG),
    "sizes": lambda _: ParallelSpec.parse(LONG),
    "registration": lambda _: register(protocol=LONG),  # type: ignore[arg-type]
    "split": lambda _: split_rows(8, 2, [float("nan")] * 10_000),
    "route": lambda _: route({0: LONG}, []),  # type: ignore[dict-item]
    "selection": lambda _: RowSelection.from_rows([LONG] * 1000),  # type: ignore[list-item]
    "slots": lambda _: ResourcePool([LONG], device="cpu"),  # type: ignore[list-item]
    "device": lambda _: ResourcePool([1], device=LONG),
    "worker": lambda _: WorkerSpec(worker=LONG, topology=Topology(ParallelSpec())),  # type: ignore[arg-type]
    "executor": lambda _: InProcessExecutor(device=LONG),
    "train backend": lambda _: load_train_backend(LONG),
    "rollout backend": lambda _: load_rollout_backend(LONG),
    "layout": lambda _: fsdp_layout({LONG: ()}, [0]),
    "dtype": lambda _: replicated_layout({"a": (2,)}, [0], dtype=LONG),
    "tensors": lambda _: check_weights(replicated_layout({"a": (2,)}, [0]), 0, {LONG: torch.zeros(2)}, "source"),
    "mapper key": on_file(read_config, f"{MAPPER}{LONG} = 1"),
    "mapper model": on_file(read_config, MAPPER.replace("qwen2.5-0.5b", LONG) + "[workload]\nglobal_batch = 1"),
    "mapper value": on_file(read_config, MAPPER.replace("num_gpus = 4", f'num_gpus = "{LONG}"') + "[workload]\n"),
    "mapper workload": lambda _: WorkloadSpec(
        global_batch=1, prompt_tokens=1, response_tokens=1, mini_batches=1, dtype=LONG
    ),
    "gpu": lambda _: gpu(LONG),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_message_shows_the_beginning_of_a_long_value(name: str, tmp_path: Path) -> None:
    with pytest.raises(HybridFlowError) as refused:
        CALLS[name](tmp_path)
    assert "x" * 100 not in str(refused.value)
    assert len(str(refused.value)) < 700
