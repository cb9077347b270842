"""Stop strings against the text of whole responses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from hf_engine import SamplingParams, load_rollout_backend
from hf_engine.backends._stop_strings import load_stop_strings
from hf_engine.testing import write_tiny_model
from hf_protocols import ParallelSpec, Topology
from hf_protocols.errors import BackendError, ConfigError


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@given(st.lists(st.integers(0, 5), max_size=12), st.lists(st.integers(0, 5), min_size=1, max_size=3), st.integers(0, 4))
def test_a_response_is_cut_after_the_token_that_completes_a_string(model, tokens, wanted, min_tokens):
    string = " ".join(f"w{number}" for number in wanted)
    sampling = SamplingParams(max_new_tokens=12, min_new_tokens=min_tokens, stop_strings=("w9 w9 w9 w9", string))
    strings = load_stop_strings(model, sampling)
    ends = [n for n in range(len(wanted), len(tokens) + 1) if tokens[n - len(wanted) : n] == wanted]
    assert strings.cut(tokens) == next((n for n in ends if n > min_tokens), None)


def test_a_string_that_was_complete_before_the_minimum_ends_nothing(model):
    def cut(tokens, min_tokens, string):
        sampling = SamplingParams(max_new_tokens=12, min_new_tokens=min_tokens, stop_strings=(string,))
        return load_stop_strings(model, sampling).cut(tokens)

    assert cut([4, 7, 5, 5, 5], 2, "w4 w7") is None
    assert cut([4, 7, 5, 4, 7], 2, "w4 w7") == 5
    assert cut([4, 7, 5, 5, 5], 1, "w4 w7") == 2
    # Across the minimum, and within a token.
    assert cut([4, 7, 5], 2, "7 w") == 3
    assert cut([4, 7, 5], 3, "7 w") is None


BYTES, LETTERS = b"a \xc3\xa9\xe2", "a\u0120\u00c3\u00a9\u00e2"
"""Some bytes, and what byte-level tokenizers write for them."""


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory):
    """A token for every byte: a character of several is none until its last."""
    tokenizer = Tokenizer(BPE({letter: number for number, letter in enumerate(LETTERS)}, []))
    tokenizer.decoder = ByteLevel()
    directory = tmp_path_factory.mktemp("bytes")
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@given(
    st.lists(st.integers(0, len(BYTES) - 1), max_size=14),
    st.text("a \u00e9", min_size=1, max_size=3),
    st.integers(0, 4),
)
def test_characters_of_several_bytes_end_a_response_with_their_last(bytes_model, tokens, string, min_tokens):
    sampling = SamplingParams(max_new_tokens=14, min_new_tokens=min_tokens, stop_strings=(string,))
    drawn = bytes(BYTES[token] for token in tokens)
    ends = [n for n in range(1, len(drawn) + 1) if drawn[:n].endswith(string.encode())]
    expected = next((n for n in ends if n > min_tokens), None)
    assert load_stop_strings(bytes_model, sampling).cut(tokens) == expected


def test_a_model_without_a_tokenizer_is_refused_with_what_to_do(tmp_path):
    directory = write_tiny_model(tmp_path)
    backend = load_rollout_backend("transformers").build(directory, topology=Topology(ParallelSpec()))
    (directory / "tokenizer.json").unlink()
    prompts = torch.nested.nested_tensor([torch.tensor([3, 4])], layout=torch.jagged)
    from tensordict import TensorDict

    batch = TensorDict({"prompt_ids": prompts, "row_id": torch.zeros(1, dtype=torch.int64)}, batch_size=[1])
    with pytest.raises(BackendError, match=r"stop_strings=\('end',\) needs tokenizer.json.*or give stop_token_ids"):
        backend.generate(batch, SamplingParams(max_new_tokens=2, stop_strings=("end",)))


def test_an_empty_string_is_refused():
    with pytest.raises(ConfigError, match="no empty string"):
        SamplingParams(max_new_tokens=2, stop_strings=("a", ""))
