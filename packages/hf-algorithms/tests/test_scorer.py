"""The worker of a reward model: responses as its own tokenizer reads them, against transformers' classifier."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig

from hf_algorithms.data import PromptDataset, Row, build_character_tokenizer, load_tokenizer, train_bpe_tokenizer
from hf_algorithms.jagged import to_jagged
from hf_algorithms.models.initial_model import InitialModel, read_role_model
from hf_algorithms.workers import RewardModelWorker
from hf_controller import WorkerContext
from hf_engine import TrainConfig
from hf_engine.testing import LocalRanks
from hf_protocols import ModelShape, ParallelSpec, Topology

TEXTS = ["one plus two is", "two and two", "say one"]
RESPONSES = ["three", "", "four one"]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ACTORS_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} says {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}answer {% endif %}"
)
CONTEXT = 48


@pytest.fixture(scope="module")
def rank() -> Iterator[LocalRanks]:
    with LocalRanks(1) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("actor")
    build_character_tokenizer("abcdefghijklmnopqrstuvwxyz<> ", directory)
    return directory


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with a tokenizer of its own, which has a chat template."""
    directory = tmp_path_factory.mktemp("reward_model")
    tokenizer = train_bpe_tokenizer(TEXTS * 3, vocab_size=280, directory=directory)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.3,
        max_position_embeddings=CONTEXT,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=1,
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    return directory


def build_batch(tokenizer: Any, rows: list[Row], ended: list[bool]) -> TensorDict:
    batch = PromptDataset(rows, tokenizer).prompts(range(len(rows)))
    ids = [
        tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] * end
        for text, end in zip(RESPONSES, ended, strict=True)
    ]
    batch["response_ids"] = to_jagged([torch.tensor(row, dtype=torch.int64) for row in ids])
    batch["response_mask"] = to_jagged([torch.ones(len(row), dtype=torch.bool) for row in ids])
    return batch


def score(
    model: str, encodes: tuple[str, str] | None, batch: TensorDict, max_tokens: int, shares_ids: bool = False
) -> Any:
    context = WorkerContext(role="reward_model", rank=0, world_size=1, topology=Topology(ParallelSpec()))
    worker = RewardModelWorker(
        context,
        model=model,
        backend="fsdp",
        training=TrainConfig(learning_rate=1.0, micro_batch_tokens=64),
        encodes=encodes,
        shares_ids=shares_ids,
        max_tokens=max_tokens,
        stop_ids=() if encodes is None else (load_tokenizer(encodes[0]).eos_token_id,),
    )
    scores = worker.compute_model_scores(batch)["model_scores"].tolist()
    worker.close()
    return scores


def ask_transformers(directory: Path, ids: list[list[int]]) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    with torch.no_grad():
        return [model(torch.tensor([row])).logits.item() for row in ids]


@pytest.mark.parametrize("max_tokens", [CONTEXT, 8])
def test_texts_are_read_by_its_own_tokenizer(
    rank: LocalRanks, actor: Path, reward_model: Path, max_tokens: int
) -> None:
    own, ended = AutoTokenizer.from_pretrained(reward_model), [True, True, False]
    batch = build_batch(load_tokenizer(str(actor)), [Row(text) for text in TEXTS], ended)
    (found,) = rank.run(score, str(reward_model), (str(actor), str(reward_model)), batch, max_tokens)
    ids = [
        (own(text)["input_ids"] + own(response)["input_ids"] + [own.eos_token_id] * end)[-max_tokens:]
        for text, response, end in zip(TEXTS, RESPONSES, ended, strict=True)
    ]
    assert found == pytest.approx(ask_transformers(reward_model, ids), abs=1e-5)


def test_chats_are_read_by_its_own_template(rank: LocalRanks, actor: Path, reward_model: Path) -> None:
    own, chats = AutoTokenizer.from_pretrained(reward_model), [({"role": "user", "content": text},) for text in TEXTS]
    ended = [True, True, False]
    actors = load_tokenizer(str(actor))
    actors.chat_template = ACTORS_TEMPLATE
    batch = build_batch(actors, [Row(chat) for chat in chats], ended)
    assert json.loads(bytes(batch["row_extra"].unbind()[0].tolist()))[0] == [*chats[0]]
    (found,) = rank.run(score, str(reward_model), (str(actor), str(reward_model)), batch, CONTEXT)
    whole = [
        own.apply_chat_template([*chat, {"role": "assistant", "content": response}], return_dict=False)
        + [own.eos_token_id] * end
        for chat, response, end in zip(chats, RESPONSES, ended, strict=True)
    ]
    assert found == pytest.approx(ask_transformers(reward_model, whole), abs=1e-5)


def test_another_template_of_the_same_tokenizer_renders_chats(
    rank: LocalRanks, reward_model: Path, tmp_path: Path
) -> None:
    """The actor's rendering has tokens that the model was not trained on; a text in the same batch has no template."""
    actors = load_tokenizer(str(reward_model))
    actors.chat_template = ACTORS_TEMPLATE
    actors.save_pretrained(tmp_path)
    rows = [Row(({"role": "user", "content": TEXTS[0]},)), Row(TEXTS[1]), Row(({"role": "user", "content": TEXTS[2]},))]
    batch = build_batch(actors, rows, [True, True, False])
    encodes = (str(tmp_path), str(reward_model))
    (found,) = rank.run(score, str(reward_model), encodes, batch, CONTEXT, True)
    own = AutoTokenizer.from_pretrained(reward_model)
    chats = [
        own.apply_chat_template(
            [{"role": "user", "content": TEXTS[row]}, {"role": "assistant", "content": RESPONSES[row]}],
            return_dict=False,
        )
        for row in (0, 2)
    ]
    text = [*batch["prompt_ids"].unbind()[1].tolist(), *batch["response_ids"].unbind()[1].tolist()]
    wanted = ask_transformers(reward_model, [[*chats[0], own.eos_token_id], text, chats[1]])
    assert found == pytest.approx(wanted, abs=1e-5)


def test_ids_of_the_same_tokenizer_pass_through(rank: LocalRanks, reward_model: Path) -> None:
    batch = build_batch(load_tokenizer(str(reward_model)), [Row(text) for text in TEXTS], [True] * 3)
    (found,) = rank.run(score, str(reward_model), None, batch, CONTEXT)
    pairs = zip(batch["prompt_ids"].unbind(), batch["response_ids"].unbind(), strict=True)
    wanted = ask_transformers(reward_model, [[*prompt.tolist(), *response.tolist()] for prompt, response in pairs])
    assert found == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("actors", "data", "own", "is_own"),
    [
        (TEMPLATE, None, TEMPLATE, False),
        (ACTORS_TEMPLATE, None, TEMPLATE, True),
        (ACTORS_TEMPLATE, TEMPLATE, TEMPLATE, False),  # data.chat_template takes the place of the actor's
        (TEMPLATE, ACTORS_TEMPLATE, TEMPLATE, True),
        (TEMPLATE, None, None, False),  # it has no other way to read a chat
    ],
)
def test_a_model_reads_by_itself_where_its_template_is_another(
    reward_model: Path, tmp_path: Path, actors: str, data: str | None, own: str | None, is_own: bool
) -> None:
    shutil.copytree(reward_model, tmp_path, dirs_exist_ok=True)
    tokenizer = load_tokenizer(str(reward_model))
    tokenizer.chat_template = own
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(tmp_path)
    tokenizer.chat_template = actors
    main = InitialModel(
        path="actor",
        tokenizer_path="actor",
        tokenizer=tokenizer,
        tokenizer_files={},
        shape=ModelShape.preset("llama-2-7b"),
        label="model.path",
        end_ids=frozenset(),
        num_spare_logits=0,
    )
    given = {"label": "reward.model.path", "backends": {}, "on_cpu": True, "head": "score", "template": data}
    found = read_role_model(str(tmp_path), main, **given)  # type: ignore[arg-type]
    assert (found.own_tokenizer_path, found.shares_ids) == (str(tmp_path) if is_own else None, True)
