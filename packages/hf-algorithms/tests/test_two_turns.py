"""Two turns with a tool: its answers are read, and never learned, by a real model and the actor's own update."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from hf_algorithms.jagged import to_jagged
from hf_algorithms.losses import Aggregation, Clip, PolicyLoss
from hf_algorithms.workers import ActorWorker
from hf_controller import WorkerContext
from hf_engine import TrainConfig
from hf_engine.testing import LocalRanks, write_tiny_model
from hf_protocols import GenerationSpec, ParallelSpec, Topology

VOCAB_SIZE = 64
PROMPTS = ([5, 9, 11], [7, 3])
CALLS = ([20, 21], [22, 23, 24])
ANSWERS = ([30, 31, 2], [32, 2])
ADVANTAGES = (1.25, -0.75)
TOOL, OTHER = ([40, 41], [42, 43]), ([50, 51], [52, 53])
LAST, OTHER_LAST = ([44], [45, 46]), ([54], [55, 56])

Texts = tuple[list[int], ...]
Gradients = dict[str, np.ndarray[Any, Any]]


def build_rows(tool: Texts, last: Texts) -> list[tuple[list[int], list[bool]]]:
    """Responses and their masks: a call, the tool's answer, an answer, and a last word of the tool."""
    rows = []
    for call, found, answer, end in zip(CALLS, tool, ANSWERS, last, strict=True):
        parts = ((call, True), (found, False), (answer, True), (end, False))
        rows.append(([token for part, _ in parts for token in part], [own for part, own in parts for _ in part]))
    return rows


def take_gradients(model: Path, tool: Texts, last: Texts) -> Gradients:
    """Gradients of the weights in an update of the actor; what stands at the tool's tokens is NaN."""
    topology = Topology(ParallelSpec(), GenerationSpec())
    context = WorkerContext(role="actor", rank=0, world_size=1, topology=topology)
    training = TrainConfig(learning_rate=1e-3)
    worker = ActorWorker(context, model=str(model), backend="fsdp", training=training, rollout="transformers")
    rows = build_rows(tool, last)
    columns = {
        "prompt_ids": to_jagged([torch.tensor(prompt) for prompt in PROMPTS]),
        "response_ids": to_jagged([torch.tensor(ids) for ids, _ in rows]),
        "response_mask": to_jagged([torch.tensor(mask) for _, mask in rows]),
        "advantages": to_jagged(
            [
                torch.tensor([value if own else float("nan") for own in mask])
                for value, (_, mask) in zip(ADVANTAGES, rows, strict=True)
            ]
        ),
        "finish_reason": torch.zeros(len(rows), dtype=torch.int64),
    }
    found: Gradients = {}
    train: Any = worker._train

    def record(grad_norm: float) -> None:
        for name, parameter in train._parameters.items():
            grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            found[name] = grad.numpy().copy()

    train._optimizer.step = record
    loss = PolicyLoss(surrogate=Clip(), aggregation=Aggregation(mode="token-mean"), old="current")
    worker.update_actor(TensorDict(columns, batch_size=[len(rows)]), loss)
    return found


def take_reference(model: Path, tool: Texts, last: Texts) -> Gradients:
    """The same by a plain forward pass a row: the mean of -advantage * log-prob over the model's own tokens."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total, count = torch.zeros(()), 0
    for prompt, (ids, mask), advantage in zip(PROMPTS, build_rows(tool, last), ADVANTAGES, strict=True):
        logits = plain(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        for position, own in enumerate(mask):
            if own:
                total = total - advantage * logits[position].log_softmax(-1)[ids[position]]
                count += 1
    (total / count).backward()
    return {name: each.grad.numpy() for name, each in plain.named_parameters() if each.grad is not None}


@pytest.fixture(scope="module")
def rank() -> Iterator[LocalRanks]:
    with LocalRanks(1) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", vocab_size=VOCAB_SIZE)


def largest_difference(one: Gradients, other: Gradients) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def test_a_last_word_of_the_tool_changes_no_gradient(rank: LocalRanks, model: Path) -> None:
    (one,) = rank.run(take_gradients, model, TOOL, LAST)
    (other,) = rank.run(take_gradients, model, TOOL, OTHER_LAST)
    assert max(np.abs(each).max() for each in one.values()) > 1e-2
    assert largest_difference(one, other) <= 1e-7


@pytest.mark.parametrize(("tool", "other"), [(TOOL, OTHER), (OTHER, TOOL)])
def test_what_the_tool_says_is_context_and_not_learned(
    rank: LocalRanks, model: Path, tool: Texts, other: Texts
) -> None:
    (found,) = rank.run(take_gradients, model, tool, LAST)
    assert largest_difference(found, take_reference(model, tool, LAST)) <= 2e-5  # float32, of gradients up to 1
    assert largest_difference(found, take_reference(model, other, LAST)) > 1e-2
