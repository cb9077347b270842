from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig

from hf_algorithms.data import build_character_tokenizer, train_bpe_tokenizer
from hf_protocols.errors import ConfigError, ModelError

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k" / "train.jsonl"
TEXTS = [f"A farmer has {n} cows and sells {n // 2} of them, so {n - n // 2} are left.\n#### {n}" for n in range(200)]


@pytest.fixture(params=["alone", "next to a model"])
def directory(request, tmp_path):
    if request.param == "next to a model":
        LlamaConfig(vocab_size=512, hidden_size=32, num_hidden_layers=1).save_pretrained(tmp_path)
    return tmp_path


def test_each_character_is_one_token(directory):
    characters = "0123456789+="
    build_character_tokenizer(characters, directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer("37+85=")["input_ids"]
    assert ids == [3 + characters.index(character) for character in "37+85="]
    assert tokenizer.decode(ids) == "37+85="
    assert (
        tokenizer.decode([*ids, tokenizer.eos_token_id, tokenizer.pad_token_id], skip_special_tokens=True) == "37+85="
    )
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert len(tokenizer) == len(characters) + 3
    assert tokenizer("1 \n?")["input_ids"] == [4, 2, 2, 2]
    assert tokenizer.is_fast


@pytest.mark.parametrize("characters", ["", "011"])
def test_a_vocabulary_needs_every_character_once(tmp_path, characters):
    with pytest.raises(ConfigError, match="every character of the vocabulary once"):
        build_character_tokenizer(characters, tmp_path)


def test_bpe_brings_every_text_back(directory):
    train_bpe_tokenizer(TEXTS, vocab_size=290, directory=directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert len(tokenizer) == 290
    for text in [
        "A farmer has 8 cows.",
        " leading",
        "tabs\tand\nlines\n\n",
        "unseen: \u00e9 \U0001f600 \u4e2d",
        "a  b , c",
    ]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    ids = tokenizer("A farmer has 123 cows")["input_ids"]
    assert len(ids) < len("A farmer has 123 cows") / 2
    assert [tokenizer.decode([index]).strip() for index in ids].count("1") == 1
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


def test_bpe_is_the_same_every_time(tmp_path):
    for name in ("once", "again"):
        train_bpe_tokenizer(iter(TEXTS), vocab_size=400, directory=tmp_path / name)
    once, again = (json.loads((tmp_path / name / "tokenizer.json").read_text()) for name in ("once", "again"))
    assert once == again


def test_a_vocabulary_too_small_for_bytes_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"256 bytes \+ 2 special tokens = 258 at least"):
        train_bpe_tokenizer(TEXTS, vocab_size=257, directory=tmp_path)
    train_bpe_tokenizer(TEXTS, vocab_size=258, directory=tmp_path)
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == 258


@pytest.mark.skipif(not GSM8K.is_file(), reason="GSM8K is not in the shared folder")
def test_real_questions_survive(tmp_path):
    rows = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()[:1000]]
    train_bpe_tokenizer((row["question"] + row["answer"] for row in rows), vocab_size=2048, directory=tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = [row[field] for row in rows[:200] for field in ("question", "answer")]
    assert tokenizer.batch_decode(tokenizer(texts)["input_ids"]) == texts
    assert len(tokenizer) == 2048


def test_a_tokenizer_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"the tokenizer cannot be written to '\S+/file/below': transformers says "):
        build_character_tokenizer("ab", tmp_path / "file" / "below")
    with pytest.raises(ModelError, match=r"the tokenizer cannot be written to "):
        train_bpe_tokenizer(["ab"], vocab_size=300, directory=tmp_path / "file" / "below")
