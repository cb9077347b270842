"""Worker groups save and load their state, and go on as if nothing had happened."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_algorithms.losses import SupervisedLoss, ValueLoss
from hf_algorithms.workers import ActorWorker, CriticWorker
from hf_controller import InProcessExecutor, ResourcePool, WorkerGroup, WorkerSpec
from hf_engine import SamplingParams, TrainConfig
from hf_engine.testing import write_tiny_model
from hf_engine.testing._cases import build_batch, build_prompts
from hf_protocols import GenerationSpec, HybridFlowError, ParallelSpec, Topology

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "save-and-restore-state.md"
VOCAB_SIZE = 64
SAMPLING = SamplingParams(max_new_tokens=4)


@pytest.fixture
def executor() -> Iterator[InProcessExecutor]:
    with InProcessExecutor() as made:
        yield made


def build(executor: InProcessExecutor, model: Path) -> dict[str, WorkerGroup]:
    shared: dict[str, Any] = {"model": str(model), "backend": "fsdp", "training": TrainConfig(learning_rate=1e-2)}
    topology = Topology(ParallelSpec(), GenerationSpec())
    specs = {
        "actor": WorkerSpec(worker=ActorWorker, topology=topology, kwargs={**shared, "rollout": "transformers"}),
        "critic": WorkerSpec(worker=CriticWorker, topology=topology, kwargs=shared),
    }
    return executor.build_groups(ResourcePool([1], device="cpu", name="all"), specs)


def run_iteration(groups: dict[str, WorkerGroup]) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Samples, and the metrics of one update of each model."""
    samples = groups["actor"].generate_sequences(build_prompts(4, vocab_size=VOCAB_SIZE), SAMPLING).result()
    batch = build_batch(4, vocab_size=VOCAB_SIZE)
    batch["values"], batch["returns"] = batch["targets"], batch["targets"]
    told = [groups["actor"].update_actor(batch, SupervisedLoss()).result()]
    told.append(groups["critic"].update_critic(batch, ValueLoss()).result())
    columns = {name: samples[name].values() for name in ("rollout_logprobs", "response_ids")}
    return columns | {"weight_version": samples["weight_version"]}, told


def test_groups_go_on_from_their_states(executor: InProcessExecutor, tmp_path: Path) -> None:
    groups = build(executor, write_tiny_model(tmp_path / "model"))
    for _ in range(2):
        run_iteration(groups)
    files = {}
    for name, group in groups.items():
        group.save_state(str(tmp_path / name), background=name == "actor").result()
        (files[name],) = group.finish_state().result()
    written = {path.name for path in (tmp_path / "critic").iterdir()}
    assert {file.path for file in files["critic"]} | {"files-00000.json"} == written  # which lists the others
    expected = [run_iteration(groups) for _ in range(2)]
    again = build(executor, tmp_path / "model")
    for name, group in again.items():
        (loaded,) = group.load_state(str(tmp_path / name), files=files[name]).result()
        assert (loaded.optimizer_steps, loaded.notice) == (2, None)
    for samples, metrics in expected:
        found, told = run_iteration(again)
        assert told == metrics
        for column, values in samples.items():
            assert torch.equal(found[column], values), column


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    block = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    exec(compile(block, str(PAGE), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines()[-1] == "0 None"


def test_a_state_that_is_not_there_is_a_typed_error(executor: InProcessExecutor, tmp_path: Path) -> None:
    groups = build(executor, write_tiny_model(tmp_path / "model"))
    with pytest.raises(HybridFlowError, match=r"absent does not exist"):
        groups["critic"].load_state(str(tmp_path / "absent")).result()
