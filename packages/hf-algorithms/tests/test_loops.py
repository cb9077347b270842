"""Loops that users write themselves: samples of prompts as they have them, gradients in parts, and steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from hf_algorithms.data import build_character_tokenizer
from hf_algorithms.jagged import decode_text, to_jagged
from hf_algorithms.losses import SupervisedLoss
from hf_algorithms.workers import ActorWorker, CriticWorker, ReferenceWorker
from hf_controller import InProcessExecutor, ResourcePool, WorkerGroup, WorkerSpec
from hf_engine import TrainConfig
from hf_engine.testing import write_tiny_model
from hf_protocols import BackendError, BatchError, ConfigError, DataError, GenerationSpec, ParallelSpec, Topology

TRAINING = TrainConfig(learning_rate=1e-2, micro_batch_tokens=64, shared_prompts=False)
"""Each row alone: one call and two then sum the same terms, and their log-probs can be held to 1e-4."""
PROMPTS = ["ab", "abcd", "b"]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "model"
    write_tiny_model(folder)
    tokenizer = build_character_tokenizer("abcdefgh: ", folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def groups(model: str) -> Iterator[dict[str, WorkerGroup]]:
    kwargs = {"model": model, "backend": "fsdp", "training": TRAINING, "offload": True}
    topology = Topology(ParallelSpec(), GenerationSpec())
    specs = {
        "actor": WorkerSpec(worker=ActorWorker, topology=topology, kwargs=kwargs | {"rollout": "transformers"}),
        "critic": WorkerSpec(worker=CriticWorker, topology=topology, kwargs=kwargs),
        "reference": WorkerSpec(worker=ReferenceWorker, topology=topology, kwargs=kwargs),
    }
    with InProcessExecutor() as executor:
        yield executor.build_groups(ResourcePool([1], device="cpu"), specs)


def rows_of(batch: TensorDict, name: str) -> list[list[Any]]:
    return [row.tolist() for row in batch[name].unbind()]


def select(batch: TensorDict, rows: list[int]) -> TensorDict:
    columns = {
        str(name): to_jagged([column[row] for row in rows]) if column.is_nested else column[rows]
        for name, column in batch.items()
    }
    return TensorDict(columns, batch_size=[len(rows)])


def test_samples_have_prompts_texts_masks_and_logprobs(groups: dict[str, WorkerGroup]) -> None:
    actor = groups["actor"]
    drawn = actor.sample(PROMPTS, {"max_new_tokens": 5, "n": 2, "temperature": 0.7, "seed": 3}).result()
    assert drawn["row_id"].tolist() == [0, 0, 1, 1, 2, 2]
    assert rows_of(drawn, "prompt_ids") == [[3, 4], [3, 4], [3, 4, 5, 6], [3, 4, 5, 6], [4], [4]]
    letters = dict(enumerate("abcdefgh: ", 3))
    for text, ids, reason in zip(
        decode_text(drawn["text"]), rows_of(drawn, "response_ids"), drawn["finish_reason"].tolist(), strict=True
    ):
        assert text == "".join(letters.get(each, "") for each in ids)
        assert (len(ids) == 5) if reason else ids[-1] == 1
    scored = actor.compute_logprobs(drawn, temperature=0.7).result()["old_logprobs"]
    torch.testing.assert_close(scored.values(), drawn["rollout_logprobs"].values(), rtol=0, atol=1e-4)
    again = actor.sample(PROMPTS, {"max_new_tokens": 5, "n": 2, "temperature": 0.7, "seed": 3}).result()
    assert rows_of(again, "response_ids") == rows_of(drawn, "response_ids")
    free = [rows_of(actor.sample(PROMPTS, {"max_new_tokens": 5, "n": 2}).result(), "response_ids") for _ in range(2)]
    assert free[0] != free[1], "without a seed every call draws other responses"


def test_texts_chats_and_ids_are_one_prompt(groups: dict[str, WorkerGroup]) -> None:
    chat = [{"role": "user", "content": "ab"}]
    drawn = groups["actor"].sample(["ab:", chat, [3, 4, 11]], {"max_new_tokens": 4, "temperature": 0}).result()
    assert rows_of(drawn, "prompt_ids") == [[3, 4, 11]] * 3
    assert len({tuple(ids) for ids in rows_of(drawn, "response_ids")}) == 1, "the likeliest tokens, each time"


def test_two_calls_are_one_call_and_rows_survive_offloading(groups: dict[str, WorkerGroup], model: str) -> None:
    actor = groups["actor"]
    batch = actor.sample(PROMPTS, {"max_new_tokens": 6, "n": 2, "seed": 1}).result()
    whole = actor.forward_backward(batch, "supervised", 20.0).result()
    norm = actor.optim_step().result()
    trained = actor.compute_logprobs(batch).result()["old_logprobs"].values()
    actor.load_model(model)
    parts = []
    for rows in ([0, 3], [1, 2, 4, 5]):
        parts.append(actor.forward_backward(select(batch, rows), SupervisedLoss(), 20.0).sums())
        actor.sample(PROMPTS, {"max_new_tokens": 6})  # generation and scores in between change nothing
        actor.compute_logprobs(batch)
    halves = actor.optim_step().result()
    assert set(norm) == {"actor/grad_norm", "actor/learning_rate"}
    assert halves["actor/grad_norm"] == pytest.approx(norm["actor/grad_norm"], rel=1e-4)
    losses = [sum(part["supervised/loss"][0] for part in parts), whole["supervised/loss"]]
    tokens = float(batch["response_mask"].values().sum())
    assert losses[0] / tokens == pytest.approx(losses[1], rel=1e-4)
    found = actor.compute_logprobs(batch).result()["old_logprobs"].values()
    torch.testing.assert_close(found, trained, rtol=0, atol=1e-4)


def test_a_lambda_is_a_loss_and_the_denominator_counts_tokens(groups: dict[str, WorkerGroup], model: str) -> None:
    actor = groups["actor"]
    batch = actor.sample(PROMPTS, {"max_new_tokens": 6, "seed": 1}).result()
    tokens = float(batch["response_mask"].values().sum())
    norms = []
    actor.load_model(model)
    for loss, denominator in (
        (lambda outputs, rows: (-(outputs["logprobs"] * rows["response_mask"]).sum(), {"mine": (2.0, 1.0)}), tokens),
        ("supervised", None),
    ):
        metrics = actor.forward_backward(batch, loss, denominator).result()
        norms.append(actor.optim_step().result()["actor/grad_norm"])
        actor.load_model(model)
        assert metrics.get("actor/mine", 2.0) == 2.0
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_critic_learns_in_the_same_way(groups: dict[str, WorkerGroup]) -> None:
    batch = groups["actor"].sample(PROMPTS, {"max_new_tokens": 6, "seed": 1}).result()
    batch["returns"] = to_jagged([torch.ones(len(row)) for row in batch["response_ids"].unbind()])
    critic = groups["critic"]
    losses = []
    for _ in range(3):
        losses.append(critic.forward_backward(batch, "value").result()["critic/value_loss"])
        critic.optim_step()
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda actor: actor.optim_step(), BackendError, "no gradients .* Call forward_backward first"),
        (lambda actor: actor.sample(PROMPTS, {"max_new_tokens": 4, "top-p": 1.0}), ConfigError, "Did you mean 'top_p'"),
        (lambda actor: actor.sample(PROMPTS, {}), ConfigError, "max_new_tokens is missing"),
        (lambda actor: actor.sample(PROMPTS, 5), ConfigError, "sampling = 5: is not a mapping"),
        (lambda actor: actor.sample("ab", {"max_new_tokens": 4}), DataError, "is not a list of prompts"),
        (lambda actor: actor.sample(["ab", ""], {"max_new_tokens": 4}), DataError, r"prompts\[1\]: has no tokens"),
        (lambda actor: actor.sample([3.5], {"max_new_tokens": 4}), DataError, r"prompts\[0\] = 3.5: is not a prompt"),
        (lambda actor: actor.sample(["ab"], {"max_new_tokens": 4000}), BackendError, "4000"),
        (lambda actor: actor.forward_backward(untrained(actor), "supervised"), BatchError, "no trained token"),
        (lambda actor: actor.forward_backward(untrained(actor), "ppoo"), ConfigError, "Did you mean 'ppo'"),
        (
            lambda actor: actor.forward_backward(untrained(actor), "value", 1.0),
            ConfigError,
            "of a model with the head 'lm' are supervised",
        ),
    ],
)
def test_mistakes_are_one_line(groups: dict[str, WorkerGroup], call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call(groups["actor"]).result()


def untrained(actor: WorkerGroup) -> TensorDict:
    batch: TensorDict = actor.sample(PROMPTS, {"max_new_tokens": 4}).result()
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    return batch


def test_an_error_drops_the_gradients(groups: dict[str, WorkerGroup]) -> None:
    actor = groups["actor"]
    batch = actor.sample(PROMPTS, {"max_new_tokens": 4}).result()
    actor.forward_backward(batch, "supervised")
    failed = actor.forward_backward(batch, lambda outputs, rows: 1 / 0, 1.0)
    with pytest.raises(BackendError, match=r"(?s)the loss raised ZeroDivisionError.*test_loops.py"):
        failed.result()
    with pytest.raises(BackendError, match="an error dropped them"):
        actor.optim_step().result()


def test_a_frozen_model_has_no_steps(groups: dict[str, WorkerGroup]) -> None:
    assert "forward_backward" not in groups["reference"].methods and "sample" not in groups["critic"].methods
