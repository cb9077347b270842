"""Blocks of texts: every token is learned exactly once, in blocks of the stated length."""

from __future__ import annotations

import random
import tempfile
from itertools import chain
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from hf_algorithms.data import Row, TextBlocks, TurnFormat, build_character_tokenizer, load_tokenizer
from hf_algorithms.run.iteration import PromptDraws
from hf_protocols.errors import BatchError, ConfigError, DataError

CHARACTERS = "0123456789"


def build_tokenizer(folder: Path, begin: int) -> PreTrainedTokenizerFast:
    """A tokenizer that puts this many tokens before a text."""
    build_character_tokenizer("<>" + CHARACTERS, folder)
    tokenizer = load_tokenizer(str(folder))
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    if begin:
        marks = "<>"[:begin]
        ids = [(mark, tokenizer.convert_tokens_to_ids(mark)) for mark in marks]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=" ".join([*marks, "$A"]), special_tokens=ids
        )
        tokenizer.bos_token = "<"
    return tokenizer


@pytest.fixture(scope="module", params=[0, 1, 2])
def begin(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def tokenizer(begin: int, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer"), begin)


def write_texts(lengths: list[int], seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choice(CHARACTERS) for _ in range(length)) for length in lengths]


LENGTHS = [[1], [40], [1, 1, 1, 1, 1, 1], [3, 50, 1, 1, 9, 12, 2], list(range(1, 30)), [7] * 11]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("more", [0, 1, 2, 5, 9, 100])
def test_every_token_is_learned_exactly_once(
    tokenizer: PreTrainedTokenizerFast, begin: int, lengths: list[int], more: int
) -> None:
    texts = write_texts(lengths)
    size = 2 * begin + 3 + more
    blocks = TextBlocks([Row("", text) for text in texts], TurnFormat(tokenizer), block_tokens=size)
    batch = blocks.batch(range(len(blocks)))
    prompts, responses, masks = (
        [row.tolist() for row in batch[name].unbind()] for name in ("prompt_ids", "response_ids", "response_mask")
    )
    learned = [
        token
        for ids, mask in zip(responses, masks, strict=True)
        for token, is_learned in zip(ids, mask, strict=True)
        if is_learned
    ]
    ends = [tokenizer.eos_token_id]
    own = [[*tokenizer(text, add_special_tokens=False)["input_ids"], *ends] for text in texts]
    wanted = list(chain.from_iterable(own))
    assert learned == (wanted if begin else wanted[1:])
    opening = tokenizer("")["input_ids"]
    assert len(opening) == begin
    stream = list(chain.from_iterable([*opening, *ids] for ids in own))
    for prompt, ids in zip(prompts, responses, strict=True):
        assert len(prompt) + len(ids) <= size
        assert prompt and ids and prompt[:begin] == opening
        piece = [*prompt[begin:], *ids] if len(prompt) > begin else [*prompt, *ids]
        assert str(piece)[1:-1] in str(stream)[1:-1], "a block is a part of the texts, after what begins a text"
    assert all(any(mask) for mask in masks)
    assert len(blocks) == -(-len(stream) // (size - begin - 1))
    assert blocks.text_lengths == [begin + length + 1 for length in lengths]


def test_a_block_does_not_depend_on_its_batch(tokenizer: PreTrainedTokenizerFast) -> None:
    blocks = TextBlocks([Row("", text) for text in write_texts([30, 5])], TurnFormat(tokenizer), block_tokens=9)
    alone = blocks.batch([2])
    together = blocks.batch([0, 2, 1])
    assert together["row_id"].tolist() == [0, 2, 1]
    for name in ("prompt_ids", "response_ids", "response_mask"):
        assert together[name].unbind()[1].tolist() == alone[name].unbind()[0].tolist()
    with pytest.raises(BatchError, match=rf"^row {len(blocks)} of a data set"):
        blocks.batch([0, len(blocks)])


def test_blocks_come_once_in_an_epoch_of_the_whole_run(tokenizer: PreTrainedTokenizerFast) -> None:
    """Iterations ask for different numbers of rows; one that resumes with the number learned goes on the same way."""
    turns = TurnFormat(tokenizer)
    blocks = TextBlocks([Row("", text) for text in write_texts([40, 40, 9])], turns, block_tokens=12)
    rows = [Row("1", "2"), Row("3", "4")]

    def learn(asked: list[list[int]], seed: int) -> list[int]:
        from hf_algorithms.data import PromptDataset

        found: list[int] = []
        data = PromptDataset(rows, tokenizer, turns=turns)
        for iteration, numbers in enumerate(asked, start=1):
            draws = PromptDraws(
                data,
                1,
                position=iteration - 1,
                iteration=iteration,
                seed=seed,
                pretraining=blocks,
                num_learned=len(found),
            )
            for number in numbers:
                found += draws.pretraining(number, max_response_tokens=1)["row_id"].tolist()
            assert draws.num_learned == len(found)
        return found

    size = len(blocks)
    found = learn([[3, 1], [], [5], [size, 3 * size - 9]], seed=0)
    epochs = [found[start : start + size] for start in range(0, 4 * size, size)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4, "each epoch has an order of its own"
    assert learn([[4 * size]], seed=0) == found
    assert learn([[4 * size]], seed=1) != found


def test_blocks_that_cannot_be_are_one_line(tokenizer: PreTrainedTokenizerFast, begin: int) -> None:
    turns, least = TurnFormat(tokenizer), 2 * begin + 3
    with pytest.raises(ConfigError, match=rf"^data.block_tokens = {least - 1}: .* needs at least {least} tokens\."):
        TextBlocks([Row("", "1")], turns, block_tokens=least - 1)
    with pytest.raises(DataError, match=r"^x has no rows"):
        TextBlocks([], turns, block_tokens=9, source="x")


def test_token_ids_are_not_kept_in_memory(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    blocks = TextBlocks([Row("", "1234")], TurnFormat(tokenizer), block_tokens=9)
    assert not any(tmp_path.iterdir()), "its name is gone, so that no run leaves it"
    assert len(blocks.batch([0])) == 1
