"""Stop strings against the text of whole responses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
    text = [" ".join(f"w{number}" for number in tokens[:count]) for count in range(1, len(tokens) + 1)]
    expected = next((n for n, each in enumerate(text, 1) if n > min_tokens and string in each), None)
    assert strings.cut(tokens) == expected


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
