"""The actor's two alarms: weights that did not change, and an engine that generates from other weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from hf_algorithms.losses import PPOPolicyLoss, SupervisedLoss
from hf_algorithms.workers import ActorWorker, actor
from hf_controller import WorkerContext
from hf_engine import SamplingParams, TrainConfig, WeightLayout
from hf_engine.backends.transformers import TransformersBackend
from hf_engine.testing import LocalRanks, write_tiny_model
from hf_engine.testing._cases import build_batch, build_prompts, select_rows
from hf_protocols import GenerationSpec, ParallelSpec, ReshardError, Topology

VOCAB_SIZE = 64
SAMPLING = SamplingParams(max_new_tokens=6, temperature=0.7)
PROMPTS = build_prompts(8, vocab_size=VOCAB_SIZE)


def build(model: Path, learning_rate: float = 1e-2) -> ActorWorker:
    topology = Topology(ParallelSpec(dp_size=dist.get_world_size()), GenerationSpec())
    context = WorkerContext(role="actor", rank=dist.get_rank(), world_size=dist.get_world_size(), topology=topology)
    training = TrainConfig(learning_rate=learning_rate)
    return ActorWorker(context, model=str(model), backend="fsdp", training=training, rollout="transformers")


def update(worker: ActorWorker) -> dict[str, float]:
    batch = build_batch(6, vocab_size=VOCAB_SIZE)
    rows = range(dist.get_rank(), 6, dist.get_world_size())
    metrics = worker.update_actor(select_rows(batch, rows), SupervisedLoss())
    return {name: value / count for name, (value, count) in metrics.items()}


def report_unchanged(model: Path) -> list[Any]:
    """What the metric says and whether this rank warned, after steps that do, or should but do not, change weights."""
    worker, found = build(model), []

    def generate_then_update() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            worker.generate_sequences(PROMPTS, SAMPLING)
        warned = any("changed no bit of its weights" in str(warning.message) for warning in caught)
        found.append((update(worker)["actor/weights_unchanged"], warned))

    generate_then_update()  # nothing to compare with
    generate_then_update()  # a step lay in between
    assert "actor/weights_unchanged" not in update(worker), "reported once a generation"
    before = {name: tensor.clone() for name, tensor in worker._train.local_weights().items()}
    worker.generate_sequences(PROMPTS, SAMPLING)
    update(worker)
    if dist.get_rank() == 1:  # the last step is lost on one rank
        for name, tensor in worker._train.local_weights().items():
            tensor.copy_(before[name])
    generate_then_update()
    worker.load_model(str(model))
    worker.generate_sequences(PROMPTS, SAMPLING)
    worker.load_model(str(model))  # equal weights, and nobody promised a change
    generate_then_update()
    worker.set_learning_rate(0.0)
    update(worker)
    worker.generate_sequences(PROMPTS, SAMPLING)
    update(worker)  # no change at this learning rate
    generate_then_update()
    return found


class Packs:
    """A rollout backend that nobody can read: it takes shards and keeps its weights to itself."""

    spoils = False

    def __init__(self, inner: TransformersBackend) -> None:
        self._inner = inner
        self._missing: set[str] = set()

    @classmethod
    def build(cls, model: str, **options: Any) -> Packs:
        return cls(TransformersBackend.build(model, **options))

    @property
    def engine_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._inner.weight_buffers().values())

    @property
    def weight_version(self) -> int:
        return self._inner.weight_version

    def weight_layout(self) -> WeightLayout:
        return self._inner.weight_layout()

    def begin_weights(self) -> None:
        self._missing = set(self._inner.weight_buffers())

    def load_shards(self, shards: Mapping[str, Sequence[torch.Tensor]]) -> None:
        for name, (part,) in shards.items():
            spoiled = self.spoils and name == "model.layers.1.mlp.down_proj.weight"
            with torch.no_grad():
                self._inner.weight_buffers()[name].copy_(-part if spoiled else part)
            self._missing.remove(name)

    def commit_weights(self, version: int) -> None:
        assert not self._missing
        self._inner.commit_weights(version)

    def generate(self, batch: TensorDict, sampling: SamplingParams) -> TensorDict:
        return self._inner.generate(batch, sampling)

    def release(self) -> int:
        return 0

    def resume(self) -> None:
        """It has kept its weights."""

    def close(self) -> None:
        self._inner.close()


class PacksAWrongWeight(Packs):
    """The sign of one parameter is lost on the way."""

    spoils = True


ENGINES = {"readable": TransformersBackend, "packed": Packs, "wrong": PacksAWrongWeight}


def recompute(model: Path, engine: str) -> str:
    """The refusal of recomputed log-probs, or nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actor, "load_rollout_backend", lambda name: ENGINES[engine])
        worker = build(model)
    batch = PROMPTS.clone()
    batch.update(worker.generate_sequences(PROMPTS, SAMPLING))
    worker.compute_logprobs(batch, temperature=1.3)  # another temperature: nothing to compare
    try:
        found = worker.compute_logprobs(batch, temperature=SAMPLING.temperature)
    except ReshardError as error:
        return str(error)
    assert set(found.keys()) == {"old_logprobs"}
    update(worker)
    worker.compute_logprobs(batch, temperature=SAMPLING.temperature)  # samples of older weights
    return ""


def trust(model: Path, engines: tuple[str, str]) -> str:
    """The refusal of the sampler's log-probs, before the step that they would have driven, or nothing."""
    engine = engines[dist.get_rank()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actor, "load_rollout_backend", lambda name: ENGINES[engine])
        worker = build(model)
    batch = PROMPTS.clone()
    batch.update(worker.generate_sequences(PROMPTS, SAMPLING)).rename_key_("rollout_logprobs", "old_logprobs")
    loss = PPOPolicyLoss(clip_range=0.2, ratio_cap=2.0)
    batch["advantages"] = torch.ones_like(batch["old_logprobs"])
    scored: list[int] = []
    score = worker._train.compute_logprobs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            worker._train,
            "compute_logprobs",
            lambda rows, **options: scored.append(len(rows)) or score(rows, **options),
        )
        try:
            # Rows out of the middle, as mini-batches are.
            worker.update_actor(batch[3:], loss, temperature=SAMPLING.temperature)
        except ReshardError as error:
            assert worker._train.optimizer_steps == 0
            return str(error)
        worker.update_actor(batch[:3], loss, temperature=SAMPLING.temperature)  # samples of older weights
    assert scored == ([4] if engine == "packed" else [])
    return ""


@pytest.fixture(scope="module")
def ranks2() -> Iterator[LocalRanks]:
    with LocalRanks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", vocab_size=VOCAB_SIZE)


def test_weights_that_a_step_did_not_change_are_counted_over_ranks_and_warned_of(
    ranks2: LocalRanks, model: Path
) -> None:
    first, second = ranks2.run(report_unchanged, model)
    assert [count for count, _ in first] == [count for count, _ in second] == [0.0, 0.0, 1.0, 0.0, 0.0]
    assert [warned for _, warned in first] == [False] * 5
    assert [warned for _, warned in second] == [False, False, True, False, False]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_that_cannot_be_read_is_judged_by_its_logprobs(ranks2: LocalRanks, model: Path, engine: str) -> None:
    for refusal in ranks2.run(recompute, model, engine):
        assert ("not those of the training weights" in refusal) == (engine == "wrong")


@pytest.mark.parametrize(
    ("engines", "refusals"),
    [
        (("readable", "readable"), ["", ""]),
        (("packed", "packed"), ["", ""]),
        (("packed", "wrong"), ["are not those of the training weights on 1 other ranks", "it generates from other"]),
    ],
)
def test_trusted_logprobs_of_an_engine_that_cannot_be_read_are_judged_by_a_few(
    ranks2: LocalRanks, model: Path, engines: tuple[str, str], refusals: list[str]
) -> None:
    for found, expected in zip(ranks2.run(trust, model, engines), refusals, strict=True):
        assert expected in found and bool(expected) == bool(found)
