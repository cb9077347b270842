from __future__ import annotations

import json
import math

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoTokenizer

from hf_algorithms.data import build_character_tokenizer
from hf_algorithms.jagged import to_jagged
from hf_algorithms.run.training_samples import MOST_BYTES, list_training_samples


@pytest.fixture
def tokenizer(tmp_path):
    build_character_tokenizer("0123456789+=", tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path)


def _batch(tokenizer, responses, **columns):
    end = tokenizer.eos_token_id
    ids = [[*tokenizer(text)["input_ids"], end] for text in responses]
    lengths = [len(row) for row in ids]
    given = {
        "prompt_ids": to_jagged([torch.tensor(tokenizer("1+2=")["input_ids"])] * len(ids)),
        "response_ids": to_jagged([torch.tensor(row) for row in ids]),
        "response_mask": to_jagged([torch.arange(length) > 0 for length in lengths]),
        "rollout_logprobs": to_jagged([-torch.arange(length).float() / 3 for length in lengths]),
    }
    return TensorDict(given | columns, batch_size=[len(ids)])


def test_rows_hold_texts_and_every_tokens_numbers(tokenizer):
    advantages = to_jagged([torch.tensor([9.0, 0.5, 1.5]), torch.tensor([9.0, -1.0])])
    batch = _batch(
        tokenizer,
        ["12", "3"],
        scores=torch.tensor([1.0, math.nan]),
        group_id=torch.tensor([7, 7]),
        row_id=torch.tensor([40, 40]),
        finish_reason=torch.tensor([0, 1]),
        answer=to_jagged([torch.tensor(list(b"3"), dtype=torch.uint8)] * 2),
        advantages=advantages,
    )
    first, second = list_training_samples(batch, tokenizer, stop_ids=[tokenizer.eos_token_id])
    assert {name: first[name] for name in ("set", "prompt", "response", "answer", "row", "group", "score")} == {
        "set": "train", "prompt": "1+2=", "response": "12", "answer": "3", "row": 40, "group": 7, "score": 1.0,
    }  # fmt: skip
    assert "".join(first["token_texts"]) == tokenizer.decode(first["token_ids"])
    assert first["token_ids"] == batch["response_ids"].unbind()[0].tolist()
    assert first["rollout_logprobs"] == [0.0, -0.33333, -0.66667]
    assert (first["response_mask"], first["advantage"], first["tokens"]) == ([0, 1, 1], 1.0, 3)
    assert (second["score"], second["finish_reason"], first["finish_reason"]) == (None, "length", "stop")
    assert "old_logprobs" not in first
    json.dumps([first, second], allow_nan=False)


def test_an_advantage_of_a_row_is_one_number(tokenizer):
    (row,) = list_training_samples(_batch(tokenizer, ["1"], advantages=torch.tensor([0.25])), tokenizer)
    assert row["advantage"] == 0.25
    assert "advantages" not in row


def test_an_iteration_takes_a_bounded_number_of_bytes(tokenizer):
    rows = list_training_samples(_batch(tokenizer, ["123456789" * 350] * 20), tokenizer)
    assert sum(len(json.dumps(row)) + 1 for row in rows) <= MOST_BYTES
    assert "token_ids" in rows[0]
    assert "token_ids" not in rows[-1]
    assert rows[-1]["response"] == "123456789" * 350
    assert len(rows) > 1
    assert list_training_samples(_batch(tokenizer, ["1" * (MOST_BYTES + 9)]), tokenizer) == []
