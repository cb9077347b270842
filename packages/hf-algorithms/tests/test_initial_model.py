"""Errors about model and tokenizer before anything starts: one line for every kind of wrong file."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_algorithms.config import ModelConfig
from hf_algorithms.data import Row, build_character_tokenizer
from hf_algorithms.models import initial_model
from hf_algorithms.models.initial_model import build_initial_model
from hf_controller.executors.shared_process import taking_turns
from hf_engine.model_directory import ModelDirectory
from hf_engine.testing import write_tiny_model
from hf_protocols import BackendError, ConfigError, WorkerTimeoutError

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b\nsize 1234\n"
BACKENDS = {"training.backend": "fsdp", "rollout.backend": "transformers"}
JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A model of 64 tokens with a tokenizer of its own."""
    model = write_tiny_model(tmp_path_factory.mktemp("model"), eos_token_id=1, tie_embeddings=False)
    build_character_tokenizer("0123456789+=a ", model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    (model / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return model


@pytest.fixture
def model(original, tmp_path) -> Path:
    return shutil.copytree(original, tmp_path / "model")


def build(path: object, tmp_path: Path, *, backends: Any = BACKENDS, rows: Sequence[Row] = (), **config: Any) -> Any:
    settings = ModelConfig(path=str(path), **config)
    return build_initial_model(settings, rows, directory=tmp_path / "fresh", seed=0, backends=backends)


def refusal(path: object, tmp_path: Path, **options: Any) -> str:
    """The one line; anything but a ConfigError fails the test as it would end in a traceback."""
    with pytest.raises(ConfigError) as refused:
        build(path, tmp_path, **options)
    message = str(refused.value)
    assert len(message.splitlines()) == 1, message
    return message


def change(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def change_tokenizer(model: Path, part: str, value: Any) -> None:
    change(model / "tokenizer.json", **{part: value})


def test_initial_model_that_is_whole_is_taken(model, tmp_path) -> None:
    built = build(model, tmp_path)
    assert (built.path, built.shape.vocab_size, built.tokenizer.eos_token_id) == (str(model), 64, 1)


# ------------------------------------------------------------------------------------------------- damaged files


@pytest.mark.parametrize("name", [*JSON_FILES, "model.safetensors"])
def test_git_lfs_pointer_is_named(model, tmp_path, name) -> None:
    (model / name).write_text(LFS)
    message = refusal(model, tmp_path)
    assert f"{name} is a Git LFS pointer, not the file itself. Run `git lfs pull`" in message
    assert message.startswith("model.path = '")


DAMAGED_TEXTS = {
    "empty": b"",
    "cut off": b'{"model_type": "llama", "vocab',
    "a list": b"[]",
    "null": b"null",
    "a number": b"7",
    "a web page": b"<!DOCTYPE html>\n<html><body>Not found</body></html>",
    "UTF-16": "{}".encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "binary": bytes(range(256)),
    "deep": b'{"a":' * 2000 + b"1" + b"}" * 2000,
    "a long integer": b'{"vocab_size": ' + b"1" * 5000 + b"}",
}


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize("text", DAMAGED_TEXTS)
def test_json_that_is_damaged_is_one_line(model, tmp_path, name, text) -> None:
    (model / name).write_bytes(DAMAGED_TEXTS[text])
    assert name in refusal(model, tmp_path)


@pytest.mark.parametrize("name", JSON_FILES)
def test_json_that_is_not_a_file_is_one_line(model, tmp_path, name) -> None:
    (model / name).unlink()
    (model / name).mkdir()
    assert name in refusal(model, tmp_path)
    (model / name).rmdir()
    (model / name).symlink_to(tmp_path / "absent")
    assert "a link to a file that does not exist" in refusal(model, tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "merges.txt"])
def test_pipe_in_the_place_of_a_file_is_not_waited_for(model, tmp_path, name) -> None:
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    assert f": {name} cannot be read: it is a device or a pipe" in refusal(model, tmp_path)


TOKENIZERS: dict[str, tuple[str, Any]] = {
    "unheard model": ("model", {"type": "Unheard"}),
    "no type": ("model", {}),
    "model null": ("model", None),
    "model a text": ("model", "WordLevel"),
    "vocabulary a list": ("model", {"type": "WordLevel", "vocab": ["a"], "unk_token": "<unk>"}),
    "ids texts": ("model", {"type": "WordLevel", "vocab": {"a": "0"}, "unk_token": "<unk>"}),
    "ids negative": ("model", {"type": "WordLevel", "vocab": {"a": -1}, "unk_token": "<unk>"}),
    "merges odd": ("model", {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b c d"]}),
    "merges unknown": ("model", {"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}),
    "unigram without scores": ("model", {"type": "Unigram", "vocab": ["a"], "unk_id": 0}),
    "unigram unknown id": ("model", {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 9}),
    "unheard splitter": ("pre_tokenizer", {"type": "Unheard"}),
    "splitter a number": ("pre_tokenizer", 3),
    "pattern broken": (
        "pre_tokenizer",
        {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
    ),
    "unheard normalizer": ("normalizer", {"type": "Unheard"}),
    "unheard decoder": ("decoder", {"type": "Unheard"}),
    "unheard processor": ("post_processor", {"type": "Unheard"}),
    "added a text": ("added_tokens", "none"),
    "added without id": ("added_tokens", [{"content": "<eos>"}]),
    "version": ("version", "9.0"),
    "no model": ("version", "1.0"),
}


@pytest.mark.parametrize("damage", TOKENIZERS)
def test_tokenizer_that_is_damaged_is_one_line(model, tmp_path, damage) -> None:
    part, value = TOKENIZERS[damage]
    change_tokenizer(model, part, value)
    if damage == "no model":
        body = json.loads((model / "tokenizer.json").read_text())
        del body["model"]
        (model / "tokenizer.json").write_text(json.dumps(body))
    assert "tokenizer" in refusal(model, tmp_path)


TOKENIZER_CONFIGS: dict[str, dict[str, Any]] = {
    "unheard class": {"tokenizer_class": "Unheard"},
    "class a number": {"tokenizer_class": 3},
    "eos a number": {"eos_token": 3},
    "eos a list": {"eos_token": ["<eos>"]},
    "eos an odd object": {"eos_token": {"text": "<eos>"}},
    "added odd": {"added_tokens_decoder": {"x": "y"}},
    "added a list": {"added_tokens_decoder": [1]},
    "length a text": {"model_max_length": {"a": 1}},
    "extra tokens a number": {"extra_special_tokens": 5},
    "padding side": {"padding_side": "middle"},
}


@pytest.mark.parametrize("damage", TOKENIZER_CONFIGS)
def test_tokenizer_config_that_is_odd_is_one_line(model, tmp_path, damage) -> None:
    """transformers takes an unheard class; what it raises of the others is one line."""
    change(model / "tokenizer_config.json", **TOKENIZER_CONFIGS[damage])
    (model / "special_tokens_map.json").unlink()  # which goes before it
    if damage == "unheard class":
        assert build(model, tmp_path).tokenizer.eos_token_id == 1
    else:
        assert "its tokenizer cannot be loaded: transformers says" in refusal(model, tmp_path)


@pytest.mark.parametrize("place", ["mine.Mine", "them/theirs--mine.Mine"])
def test_tokenizer_with_code_of_its_own_is_refused(model, tmp_path, monkeypatch, place) -> None:
    """Nobody is asked on the terminal, and the file is not run."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the terminal was asked"))
    (model / "mine.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')")
    settings = {"auto_map": {"AutoTokenizer": [place, None]}, "tokenizer_class": "Mine"}
    change(model / "tokenizer_config.json", **settings)
    refused = refusal(model, tmp_path)
    assert refused == (
        f"model.path = '{model}': its tokenizer is a Mine, which is code of its own (auto_map in "
        "tokenizer_config.json) and is never run. Save it with a class of transformers, as a tokenizer.json"
    )
    assert not (tmp_path / "run").exists()


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "unheard family": ({"model_type": "unheard"}, "unheard"),
    "family a list": ({"model_type": ["llama"]}, "model_type"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
    "layers a text": ({"num_hidden_layers": "two"}, "num_hidden_layers='two'"),
    "layers NaN": ({"num_hidden_layers": float("nan")}, "num_hidden_layers=nan"),
    "layers huge": ({"num_hidden_layers": 10**30}, "num_hidden_layers=1000"),
    "width negative": ({"hidden_size": -64}, "hidden_size=-64"),
    "width fractional": ({"hidden_size": 64.5}, "hidden_size=64.5"),
    "heads true": ({"num_attention_heads": True}, "num_attention_heads=True"),
    "key heads": ({"num_key_value_heads": 0}, "num_kv_heads=0"),
    "vocabulary": ({"vocab_size": 65}, "model.embed_tokens.weight"),
    "positions": ({"max_position_embeddings": -1}, "max_position_embeddings=-1"),
    "activation": ({"hidden_act": "swish-swish"}, "swish-swish"),
    "norm a text": ({"rms_norm_eps": "small"}, "small"),
    "rope a number": ({"rope_scaling": 5}, "rope_scaling=5"),
    "rope a list": ({"rope_parameters": [1]}, r"rope_parameters=[1]"),
    "rope unheard": ({"rope_scaling": {"rope_type": "unheard"}}, "rope_type='unheard'"),
    "rope without factor": ({"rope_scaling": {"rope_type": "linear"}}, "factor=None"),
    "rope factor a text": ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor='4'"),
    "rope factor NaN": ({"rope_scaling": {"type": "yarn", "factor": float("nan")}}, "factor=nan"),
    "longrope incomplete": ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "config.json"),
    "dtype": ({"dtype": "float7"}, "dtype='float7'"),
    "quantised by GPTQ": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        "is quantised (quant_method='gptq'",
    ),
    "quantised by AWQ": ({"quantization_config": {"quant_method": "awq"}}, "is quantised (quant_method='awq'"),
    "quantised by bitsandbytes": ({"quantization_config": {"load_in_4bit": True}}, "is quantised"),
    "classifier": ({"architectures": ["LlamaForSequenceClassification"], "tie_word_embeddings": True}, "config.json"),
    "end outside": ({"eos_token_id": 64}, "64"),
    "attention bias": ({"attention_bias": True}, "self_attn.q_proj.bias"),
    "remote code": ({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}, "model_type='mine'"),
}


@pytest.mark.parametrize("damage", CONFIGS)
def test_config_that_is_damaged_is_one_line(model, tmp_path, damage) -> None:
    entries, told = CONFIGS[damage]
    change(model / "config.json", **entries)
    (model / "generation_config.json").unlink()
    message = refusal(model, tmp_path)
    assert told in message
    assert message.startswith(("model.path = '", "training.backend = 'fsdp': model.path = '"))


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        (64, "64 is outside the vocabulary of 64 tokens. Set it to the id"),
        ([1, 99], "99 is outside the vocabulary"),
        (-1, "-1 is outside the vocabulary"),
        ("1", "eos_token_id='1'"),
        (True, "eos_token_id=True"),
        ([[1]], r"eos_token_id=[[1]]"),
        ({"a": 1}, "eos_token_id={'a': 1}"),
    ],
)
def test_end_token_outside_the_vocabulary_is_named(model, tmp_path, ids, told) -> None:
    change(model / "generation_config.json", eos_token_id=ids)
    message = refusal(model, tmp_path)
    assert "generation_config.json" in message and told in message


# ---------------------------------------------------------------------------------------- tokenizer against model


def test_tokenizer_with_more_tokens_than_rows_is_refused(tmp_path) -> None:
    model = write_tiny_model(tmp_path / "model", vocab_size=16, eos_token_id=1)
    build_character_tokenizer("0123456789+=a ", model)  # 17 tokens with the special ones
    message = refusal(model, tmp_path)
    assert "has the token ' ' with id 16, the model's embedding has 16 rows" in message
    build_character_tokenizer("0123456789+=a", model)
    assert build(model, tmp_path).shape.vocab_size == 16


def test_tokenizer_without_an_end_is_refused(model, tmp_path) -> None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        body = json.loads((model / name).read_text())
        body.pop("eos_token", None)
        (model / name).write_text(json.dumps(body))
    assert "has no eos_token, so responses could never end. Set eos_token in its tok" in refusal(model, tmp_path)


def test_a_fresh_model_that_memory_does_not_hold_is_refused(tmp_path) -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_layers": 800, "num_heads": 64}
    config = ModelConfig(tokenizer="characters", **sizes)
    rows = [Row(prompt="1+1=", answer="2", columns={})]
    with pytest.raises(ConfigError, match=r"num_layers = 800 make a fresh model of 778\.5B parameters.* model.path$"):
        build_initial_model(config, rows, directory=tmp_path / "fresh", seed=0, backends=BACKENDS)


def test_tokenizer_key_is_named(model, tmp_path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    change_tokenizer(other, "model", {"type": "Unheard"})
    message = refusal(model, tmp_path, tokenizer=str(other))
    assert message.startswith(f"model.tokenizer = '{other}': its tokenizer cannot be loaded: transformers says")


def test_a_made_tokenizer_is_refused_where_the_model_has_another(model, tmp_path) -> None:
    rows = [Row(prompt="1+1=", answer="2", columns={})]
    message = refusal(model, tmp_path, tokenizer="characters", rows=rows)
    assert message.startswith("model.tokenizer = 'characters': makes a tokenizer for a fresh model, and model.path = ")
    assert message.endswith("has one of its own with another vocabulary. Leave model.tokenizer out")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "fresh" / name).replace(model / name)  # as of an earlier run that made it of the same texts
    assert build(model, tmp_path, tokenizer="characters", rows=rows).path == str(model)


# --------------------------------------------------------------------------------------------------------- paths


@pytest.mark.parametrize("key", ["path", "tokenizer"])
@pytest.mark.parametrize(
    "value", ["./absent", "/absent", "~/absent", "../absent", "a/b/c", "absent/", "no such", "$DIR/a"]
)
def test_path_that_is_absent_is_named_as_a_path(model, tmp_path, monkeypatch, key, value) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"path": value} if key == "path" else {"path": str(model), "tokenizer": value}
    with pytest.raises(ConfigError) as refused:
        build_initial_model(ModelConfig(**settings), [], directory=tmp_path, seed=0)
    assert str(refused.value).startswith(f"model.{key} = {os.path.expanduser(value)!r}: no such directory")
    assert "hub" not in str(refused.value)
    assert ("Variables such as $DIR are not replaced in a path" in str(refused.value)) is ("$" in value)


@pytest.mark.parametrize("value", ["nowhere", "nobody/nothing"])
def test_hub_name_that_is_nowhere_says_both(tmp_path, monkeypatch, value) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    assert refusal(value, tmp_path).startswith(
        f"model.path = {value!r}: no such directory, and the hub is not reachable (HF_HUB_OFFLINE is set)"
    )


def test_path_to_a_file_is_named_as_a_path(model, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "is a file, not a directory" in refusal("model/config.json", tmp_path)
    assert "is a file, not a directory" in refusal("./model/model.safetensors", tmp_path)


def test_home_directory_is_expanded(model, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    built = build("~/model", tmp_path)
    assert (built.path, built.tokenizer_path) == (str(model), str(model))


# ------------------------------------------------------------------------------------------------------- backends


def test_backend_that_cannot_run_the_model_is_named(model, tmp_path, monkeypatch) -> None:
    """A backend says by a class method what it does not run; one without it is not asked."""

    class Picky:
        @classmethod
        def check_model(cls, files: ModelDirectory, *, on_cpu: bool, options=None) -> None:
            raise BackendError(f"{files.label}: head_dim={files.require_shape().head_dim}, {on_cpu}")

    monkeypatch.setitem(initial_model._LOADERS, "rollout.backend", {"picky": Picky, "easy": object}.__getitem__)
    build(model, tmp_path, backends={"rollout.backend": "easy"})
    message = refusal(model, tmp_path, backends={"rollout.backend": "picky"})
    assert message == f"rollout.backend = 'picky': model.path = '{model}': head_dim=32, True"


@pytest.mark.parametrize("key", ["max_positions", "hidden_size", "intermediate_size", "num_layers", "num_heads"])
def test_size_next_to_a_path_is_true_or_refused(model, tmp_path, key) -> None:
    actual = getattr(build(model, tmp_path).shape, key)
    assert getattr(build(model, tmp_path, **{key: actual}).shape, key) == actual
    message = refusal(model, tmp_path, **{key: actual + 1})
    assert message.startswith(
        f"model.{key} = {actual + 1}: model.path = '{model}' has {key} = {actual}. Leave model.{key} out"
    )


def test_stretched_context_is_the_models(model, tmp_path) -> None:
    change(model / "config.json", rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert build(model, tmp_path).shape.max_positions == 96
    assert "has max_positions = 96" in refusal(model, tmp_path, max_positions=48)


def test_reward_model_is_not_a_model_to_train(model, tmp_path) -> None:
    weights = load_file(model / "model.safetensors")
    weights["score.weight"] = weights.pop("lm_head.weight")[:1].clone()
    save_file(weights, model / "model.safetensors")
    assert "is a reward model or sequence classifier: it holds 'score.weight'" in refusal(model, tmp_path)


@pytest.mark.parametrize("changes", [{"cache_implementation": "nope"}, {"max_new_tokens": -1}])
def test_generation_config_that_transformers_refuses_is_one_line(model, tmp_path, changes) -> None:
    change(model / "generation_config.json", **changes)
    message = refusal(model, tmp_path, backends=BACKENDS)
    assert "its generation_config.json cannot be used: transformers says" in message


def test_a_fresh_model_draws_while_no_rank_of_this_process_does(tmp_path: Path, monkeypatch) -> None:
    make, refusals = AutoModelForCausalLM.from_config, []

    def draw_elsewhere() -> None:
        with pytest.raises(WorkerTimeoutError), taking_turns(0.01):
            pass
        refusals.append("waited in vain")

    def from_config(*args: Any, **kwargs: Any) -> Any:
        if "dtype" in kwargs:  # else its layers are only named, on the device meta
            thread = threading.Thread(target=draw_elsewhere)
            thread.start()
            thread.join(20)
        return make(*args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", from_config)
    build_initial_model(
        ModelConfig(tokenizer="characters"), [Row("1+1=")], directory=tmp_path, seed=0, backends=BACKENDS
    )
    assert refusals == ["waited in vain"]
