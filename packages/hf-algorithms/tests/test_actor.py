"""The actor's two alarms: weights that did not change, and an engine that generates from other weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine_testing.packed_engine import PackedEngine
from hf_algorithms.losses import Aggregation, SupervisedLoss
from hf_algorithms.workers import ActorWorker, actor
from hf_controller import WorkerContext
from hf_engine import SamplingParams, TrainConfig
from hf_engine.rollout.transformers import TransformersBackend
from hf_engine.testing import LocalRanks, write_tiny_model
from hf_engine.testing._cases import build_batch, build_prompts, select_rows
from hf_protocols import BatchError, GenerationSpec, ParallelSpec, ReshardError, Topology

VOCAB_SIZE = 64
SAMPLING = SamplingParams(max_new_tokens=6, temperature=0.7)
PROMPTS = build_prompts(8, vocab_size=VOCAB_SIZE)
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant", "prompt-mean")


def build(model: Path, learning_rate: float = 1e-2, **training_options: Any) -> ActorWorker:
    topology = Topology(ParallelSpec(dp_size=dist.get_world_size()), GenerationSpec())
    context = WorkerContext(role="actor", rank=dist.get_rank(), world_size=dist.get_world_size(), topology=topology)
    training = TrainConfig(learning_rate=learning_rate, **training_options)
    return ActorWorker(context, model=str(model), backend="fsdp", training=training, rollout="transformers")


def update(worker: ActorWorker, *, trained: bool = True) -> dict[str, float]:
    batch = build_batch(6, vocab_size=VOCAB_SIZE)
    if not trained:
        batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    rows = range(dist.get_rank(), 6, dist.get_world_size())
    metrics = worker.update_actor(select_rows(batch, rows), SupervisedLoss())
    return {name: value / count for name, (value, count) in metrics.items()}


def update_cut_rows(worker: ActorWorker, mode: Any) -> dict[str, float]:
    """An update with `overlong_filter` on responses that were all cut by their length."""
    batch = select_rows(build_batch(6, vocab_size=VOCAB_SIZE), range(dist.get_rank(), 6, dist.get_world_size()))
    batch["finish_reason"] = torch.ones(len(batch), dtype=torch.int64)
    batch["group_tokens"] = torch.zeros(len(batch), dtype=torch.float64)
    constant = 6.0 if mode == "constant" else None
    loss = SupervisedLoss(aggregation=Aggregation(mode=mode, constant=constant, overlong_filter=True))
    metrics = worker.update_actor(batch, loss)
    with pytest.raises(BatchError, match="the batch has no trained token"):
        worker.forward_backward(batch, loss)
    return {name: value / count for name, (value, count) in metrics.items()}


def observe(batch: Any) -> Any:
    """The batch, where the second token of each response is a tool's: nobody drew it."""
    shape = batch["response_mask"]
    mask, logprobs = (batch[name].values().clone() for name in ("response_mask", "rollout_logprobs"))
    observed = shape.offsets()[:-1][shape.offsets().diff() > 1] + 1
    mask[observed], logprobs[observed] = False, float("nan")
    for name, values in (("response_mask", mask), ("rollout_logprobs", logprobs)):
        batch[name] = torch.nested.nested_tensor_from_jagged(values, shape.offsets())
    return batch


def skip_a_step(model: Path) -> tuple[dict[str, float], bool, dict[str, float]]:
    """Metrics of an update without a trained token, whether it changed weights, and those of the next one."""
    worker = build(model)
    update(worker)  # momentum, which would move the weights without a gradient
    before = {name: tensor.clone() for name, tensor in worker._train.local_weights().items()}
    skipped = update(worker, trained=False)
    after = worker._train.local_weights()
    return skipped, all(torch.equal(before[name], after[name]) for name in before), update(worker)


def skip_cut_rows(model: Path) -> list[tuple[dict[str, float], bool]]:
    """Metrics of updates after one whose momentum would move the weights, and if they left them as they were."""
    worker = build(model)
    update(worker)
    before = {name: tensor.clone() for name, tensor in worker._train.local_weights().items()}
    found = []
    for mode in MODES:
        metrics = update_cut_rows(worker, mode)
        after = worker._train.local_weights()
        found.append((metrics, all(torch.equal(before[name], after[name]) for name in before)))
    return found


def judge(model: Path, spoils_from: int | None) -> list[str]:
    """Of every iteration the refusal of what the sampler reported, or nothing."""

    def build_packed(directory: str, **options: Any) -> PackedEngine:
        return PackedEngine(TransformersBackend.build(directory, **options), spoils_from)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actor, "load_rollout_backend", lambda name: SimpleNamespace(build=build_packed))
        worker = build(model)
    refusals = []
    for _ in range(2):
        batch = PROMPTS.clone()
        try:
            batch = observe(batch.update(worker.generate_sequences(PROMPTS, SAMPLING)))
            worker.compute_logprobs(batch, temperature=1.3)  # another temperature: nothing to compare
            found = worker.compute_logprobs(batch, temperature=SAMPLING.temperature)
        except ReshardError as error:
            refusals.append(str(error))
        else:
            assert set(found.keys()) == {"old_logprobs"}
            refusals.append("")
        update(worker)
        if not refusals[-1]:
            worker.compute_logprobs(batch, temperature=SAMPLING.temperature)  # samples of older weights
    return refusals


@pytest.fixture(scope="module")
def ranks2() -> Iterator[LocalRanks]:
    with LocalRanks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize(("spoils_from", "wrong"), [(None, [False, False]), (2, [False, True]), (1, [True, True])])
def test_an_unreadable_engine_is_judged_in_every_iteration(
    ranks2: LocalRanks, model: Path, spoils_from: int | None, wrong: list[bool]
) -> None:
    for refusals in ranks2.run(judge, model, spoils_from):
        assert ["not those of the training weights" in refusal for refusal in refusals] == wrong
        assert [bool(refusal) for refusal in refusals] == wrong


def test_an_update_without_a_trained_token_changes_nothing(ranks2: LocalRanks, model: Path) -> None:
    for skipped, unchanged, following in ranks2.run(skip_a_step, model):
        assert skipped == {"actor/skipped_steps": 1.0}
        assert unchanged
        assert "actor/grad_norm" in following


def test_an_update_on_responses_that_were_all_cut_is_skipped(ranks2: LocalRanks, model: Path) -> None:
    for found in ranks2.run(skip_cut_rows, model):
        assert found == [({"actor/skipped_steps": 1.0}, True)] * len(MODES)


def train_at_a_constant_rate(model: Path) -> list[float]:
    """The learning rates of two steps of a warm start, and of two after the warm model was loaded."""
    worker = build(model, schedule="linear", total_steps=4)
    worker.set_learning_rate(0.5, constant=True)
    found = [update(worker)["actor/learning_rate"] for _ in range(2)]
    worker.load_model(str(model))
    return found + [update(worker)["actor/learning_rate"] for _ in range(2)]


def test_a_schedule_begins_where_a_model_is_loaded(ranks2: LocalRanks, model: Path) -> None:
    for found in ranks2.run(train_at_a_constant_rate, model):
        assert found == pytest.approx([0.5, 0.5, 1e-2, 0.75e-2])
