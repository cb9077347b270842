"""Stop strings against the text of whole responses."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, ByteLevel, Fuse, Sequence
from tokenizers.models import BPE

from hf_engine import SamplingParams, load_rollout_backend
from hf_engine.rollout.stop_strings import load_stop_strings
from hf_engine.testing import write_tiny_model
from hf_engine.testing._cases import build_prompts, rows_of
from hf_protocols import ParallelSpec, Topology
from hf_protocols.errors import BackendError, BackendUnavailableError, ConfigError


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@given(st.lists(st.integers(0, 5), max_size=12), st.lists(st.integers(0, 5), min_size=1, max_size=3), st.integers(0, 4))
def test_a_response_ends_with_the_token_that_completes_a_string(model, tokens, wanted, min_tokens):
    string = " ".join(f"w{number}" for number in wanted)
    sampling = SamplingParams(max_new_tokens=12, min_new_tokens=min_tokens, stop_strings=("w9 w9 w9 w9", string))
    strings = load_stop_strings(model, sampling)
    ends = [n for n in range(len(wanted), len(tokens) + 1) if tokens[n - len(wanted) : n] == wanted]
    assert strings.cut(tokens) == next((n for n in ends if n > min_tokens), None)


def test_a_string_complete_before_the_minimum_ends_nothing(model):
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
def test_multibyte_characters_end_a_response_at_their_last_byte(bytes_model, tokens, string, min_tokens):
    sampling = SamplingParams(max_new_tokens=14, min_new_tokens=min_tokens, stop_strings=(string,))
    drawn = bytes(BYTES[token] for token in tokens)
    ends = [n for n in range(1, len(drawn) + 1) if drawn[:n].endswith(string.encode())]
    expected = next((n for n in ends if n > min_tokens), None)
    assert load_stop_strings(bytes_model, sampling).cut(tokens) == expected


@pytest.fixture(scope="module")
def fallback_model(tmp_path_factory):
    """The letter `a`, and bytes for all other characters; where one lacks bytes, those next to it are not decoded."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a"]
    ids = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(BPE(ids, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = Sequence([ByteFallback(), Fuse()])
    directory = tmp_path_factory.mktemp("fallback")
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@given(st.text("a\n\u00e9\u20ac", max_size=9), st.text("a\n\u00e9", min_size=1, max_size=2), st.integers(0, 6))
def test_bytes_of_whole_characters_hide_no_string(fallback_model, text, string, min_tokens):
    drawn = [bytes([byte]) for byte in text.encode()]
    tokens = [257 if byte == b"a" else 1 + byte[0] for byte in drawn]
    ends = [n for n in range(1, len(drawn) + 1) if b"".join(drawn[:n]).endswith(string.encode())]
    sampling = SamplingParams(max_new_tokens=32, min_new_tokens=min_tokens, stop_strings=(string,))
    assert load_stop_strings(fallback_model, sampling).cut(tokens) == next((n for n in ends if n > min_tokens), None)


def test_a_model_without_a_tokenizer_is_refused_with_what_to_do(tmp_path):
    directory = write_tiny_model(tmp_path)
    backend = load_rollout_backend("transformers").build(directory, topology=Topology(ParallelSpec()))
    (directory / "tokenizer.json").unlink()
    prompts = torch.nested.nested_tensor([torch.tensor([3, 4])], layout=torch.jagged)
    from tensordict import TensorDict

    batch = TensorDict({"prompt_ids": prompts, "row_id": torch.zeros(1, dtype=torch.int64)}, batch_size=[1])
    with pytest.raises(BackendError, match=r"stop_strings=\('end',\) needs tokenizer.json of .*or set stop_token_ids"):
        backend.generate(batch, SamplingParams(max_new_tokens=2, stop_strings=("end",)))


SAMPLING = SamplingParams(max_new_tokens=8, stop_strings=("w4 w7",))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache of the hub's client that holds a model `maker/tiny`, and no network."""
    revision = "0" * 40
    kept = tmp_path / "models--maker--tiny"
    snapshot = write_tiny_model(kept / "snapshots" / revision)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return snapshot


def test_a_model_of_the_hub_has_its_tokenizer_there(hub):
    backend = load_rollout_backend("transformers").build("maker/tiny", topology=Topology(ParallelSpec()))
    prompts = build_prompts(8, vocab_size=64)
    whole = rows_of(backend.generate(prompts, SamplingParams(max_new_tokens=8, greedy=True))["response_ids"])
    first, second = whole[0][2:4].tolist()
    sampling = SamplingParams(max_new_tokens=8, greedy=True, stop_strings=(f"w{first} w{second}",))
    found = rows_of(backend.generate(prompts, sampling)["response_ids"])
    assert torch.equal(found[0], whole[0][: len(found[0])])
    assert found[0][-2:].tolist() == [first, second]
    assert load_stop_strings("maker/tiny", SAMPLING).cut([4, 7]) == 2
    (hub / "tokenizer.json").unlink()
    with pytest.raises(BackendError, match=r"needs tokenizer.json of 'maker/tiny' .*or set stop_token_ids"):
        load_stop_strings("maker/tiny", SAMPLING)
    with pytest.raises(BackendError, match=r"needs tokenizer.json of 'maker/other'"):
        load_stop_strings("maker/other", SAMPLING)


def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BackendError, match=r"tokenizer.json is not valid JSON: "):
        load_stop_strings(tmp_path, SAMPLING)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(BackendUnavailableError, match=r'need tokenizers.*: pip install "tokenizers>=0.22"'):
        load_stop_strings(tmp_path, SAMPLING)


def test_an_empty_string_is_refused():
    with pytest.raises(ConfigError, match="an empty string"):
        SamplingParams(max_new_tokens=2, stop_strings=("a", ""))
