"""Outputs of a model that a loss asks for: passed to the engine, and checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from tensordict import TensorDict

from hf_algorithms import AlgorithmConfig, Recipe, derive_dataflow
from hf_algorithms.jagged import to_jagged
from hf_algorithms.losses import DistillationLoss, PolicyLoss, SupervisedLoss, ValueLoss
from hf_algorithms.recipes import ACTOR, CRITIC, RECIPES, REWARD, generate_scored
from hf_algorithms.workers import ActorWorker, CriticWorker
from hf_algorithms.workers._outputs import read_outputs
from hf_controller import WorkerContext
from hf_engine import SamplingParams
from hf_protocols import ConfigError, ModelShape, ParallelSpec, Topology


@dataclass(frozen=True)
class AskingLoss:
    """Of a user, with what it asks for."""

    outputs: Any
    reads: tuple[str, ...] = ("response_mask",)

    def __call__(self, outputs: Mapping[str, Any], micro_batch: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        return sum(outputs[name].sum() for name in self.outputs), {}


@pytest.mark.parametrize(
    ("loss", "head", "wanted"),
    [
        (PolicyLoss(), "lm", ("logprobs", "entropy")),
        (DistillationLoss(), "lm", ("logprobs", "entropy", "candidate_logprobs")),
        (SupervisedLoss(), "lm", ("logprobs",)),
        (ValueLoss(), "value", ("values",)),
        (lambda outputs, micro_batch: (outputs["logprobs"].sum(), {}), "lm", ("logprobs",)),
        (AskingLoss(["entropy"]), "lm", ("entropy",)),
    ],
)
def test_a_loss_says_what_it_needs(loss: Any, head: str, wanted: tuple[str, ...]) -> None:
    assert read_outputs(loss, head) == wanted


@pytest.mark.parametrize(
    ("loss", "head", "says"),
    [
        (AskingLoss(("hidden_states",)), "lm", "has logprobs, entropy, candidate_logprobs, not 'hidden_states'"),
        (PolicyLoss(), "value", "a model with the head 'value' has values, not 'logprobs'"),
        (AskingLoss("entropy"), "lm", "AskingLoss.outputs='entropy': is not a tuple of names"),
        (AskingLoss((1,)), "lm", "is not a tuple of names"),
        (AskingLoss(("candidate_logprobs",)), "lm", "of the tokens in the column candidate_ids. Name it in `reads`"),
    ],
)
def test_what_no_model_has_is_refused(loss: Any, head: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_outputs(loss, head)
    assert says in str(error.value)


class AskingConfig(AlgorithmConfig):
    name: Literal["mine"] = "mine"


@pytest.mark.parametrize(
    ("method", "loss", "says"),
    [
        ("actor.update_actor", AskingLoss(("logits",)), "not 'logits'"),
        ("critic.update_critic", PolicyLoss(old="current"), "a model with the head 'value' has values"),
    ],
)
def test_a_traced_call_is_checked(method: str, loss: Any, says: str) -> None:
    role, name = method.split(".")

    def step(roles: Any, prompts: Any, config: Any, context: Any) -> Any:
        batch = generate_scored(roles, prompts, context)
        batch = batch.union(batch.select(["rollout_logprobs"]).rename({"rollout_logprobs": "advantages"}))
        return [getattr(getattr(roles, role), name)(batch, loss)]

    recipe = Recipe(name="mine", config=AskingConfig, roles=(ACTOR, CRITIC, REWARD), step=step)
    with pytest.raises(ConfigError) as error:
        derive_dataflow(recipe, AskingConfig(), SamplingParams(max_new_tokens=4), num_prompts=4)
    assert str(error.value).startswith(f"{method}: ")
    assert says in str(error.value)


class RecordingBackend:
    """Takes a step and keeps what it was asked for."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def sum_over_data(self, values: list[float]) -> list[float]:
        return values

    def train_step(self, batch: Any, loss: Any, denominator: float, **options: Any) -> dict[str, tuple[float, float]]:
        self.options.append({name: value for name, value in options.items() if name != "temperature"})
        return {"grad_norm": (1.0, 1.0), "learning_rate": (1.0, 1.0)}


@pytest.mark.parametrize(
    ("worker_class", "loss", "options"),
    [
        (ActorWorker, SupervisedLoss(), {}),
        (ActorWorker, PolicyLoss(), {"entropy": True}),
        (ActorWorker, DistillationLoss(), {"entropy": True, "candidates": True}),
        (ActorWorker, AskingLoss(("candidate_logprobs",), ("response_mask", "candidate_ids")), {"candidates": True}),
        (CriticWorker, ValueLoss(), {}),
    ],
)
def test_an_engine_computes_what_the_loss_needs(worker_class: type[Any], loss: Any, options: dict[str, Any]) -> None:
    batch = TensorDict({"response_mask": torch.ones(1, 3, dtype=torch.bool)}, batch_size=[1])
    assert find_options(worker_class, loss, batch, None) == options


def test_rows_to_learn_do_not_change_what_the_loss_needs() -> None:
    rows = {name: to_jagged([torch.ones(3, dtype=torch.int64)]) for name in ("prompt_ids", "response_ids")}
    rows["response_mask"] = to_jagged([torch.ones(3, dtype=torch.bool)])
    held = TensorDict(rows, batch_size=[1])
    ids, logprobs = to_jagged([torch.ones(3, 2, dtype=torch.int32)]), to_jagged([torch.ones(3, 2)])
    batch = TensorDict(rows | {"candidate_ids": ids, "teacher_candidate_logprobs": logprobs}, batch_size=[1])
    assert find_options(ActorWorker, DistillationLoss(), batch, held) == {"entropy": True, "candidates": True}


def find_options(worker_class: type[Any], loss: Any, batch: TensorDict, held: TensorDict | None) -> dict[str, Any]:
    worker = object.__new__(worker_class)
    worker.context = WorkerContext(role="actor", rank=0, world_size=1, topology=Topology(ParallelSpec()))
    worker._train = backend = RecordingBackend()
    worker.pretraining = held
    worker._update(batch, loss, pretrain_weight=1.0)
    (options,) = backend.options
    return options


def test_a_top_k_that_leaves_no_rest_is_refused() -> None:
    config = RECIPES["distillation"].config(name="distillation", signal="top_k", top_k=16)
    shape = ModelShape.preset("llama-2-7b")

    def find(actor: int, teacher: int) -> list[str]:
        models = {"actor": _resize(shape, actor), "teacher": _resize(shape, teacher)}
        return list(config.find_misfits(models))

    assert find(17, 20) == find(20, 17) == []
    (line,) = find(16, 20)
    assert line == (
        "algorithm.top_k = 16: the actor's vocabulary has 16 tokens, and at least one must be left for the rest. "
        "Lower it to at most 15"
    )
    assert "the teacher's vocabulary has 12 tokens" in find(20, 12)[0]
    assert list(RECIPES["distillation"].config(name="distillation").find_misfits({})) == []


def _resize(shape: ModelShape, vocab_size: int) -> ModelShape:
    return replace(shape, vocab_size=vocab_size)


@pytest.mark.parametrize(
    ("key", "value"),
    [("old_logprobs", "recomputed"), ("correction", "tis"), ("kl_coefficient", 0.1), ("entropy_coefficient", 0.1)],
)
def test_keys_of_a_policy_gradient_do_not_go_with_top_k(key: str, value: Any) -> None:
    config_class = RECIPES["distillation"].config
    (line,) = config_class(name="distillation", signal="top_k", **{key: value}).find_contradictions()
    assert line.startswith(f"algorithm.{key} = {value!r}: algorithm.signal = 'top_k' has no policy gradient")
    assert list(config_class(name="distillation", signal="top_k").find_contradictions()) == []


def test_the_dataflow_of_top_k_has_no_old_log_probs() -> None:
    config = RECIPES["distillation"].config(name="distillation", signal="top_k")
    flow = derive_dataflow(RECIPES["distillation"], config, SamplingParams(max_new_tokens=4), num_prompts=4)
    assert [f"{call.role}.{call.method}" for call in flow.calls] == [
        "actor.generate_sequences",
        "reward.compute_reward",
        "teacher.compute_teacher_candidates",
        "advantage.compute_metrics",  # the role has no other call, and needs a place
        "actor.update_actor",
    ]
    assert {"candidate_ids", "teacher_candidate_logprobs"} <= set(flow.calls[-1].reads)
