"""The one reader of a model on disk: files that are damaged, another kind, or not one model, each one line."""

from __future__ import annotations

import json
import logging
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_engine.model_directory import (
    check_model_directory,
    describe_export,
    errors_of,
    find_model,
    read_end_of_sequence_ids,
    read_model_directory,
)
from hf_engine.testing import write_tiny_model
from hf_protocols import BackendError, ConfigError, ModelError, ModelShape

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")


def check(directory, **options):
    files = read_model_directory(directory)
    check_model_directory(files, **options)
    return files


def refusal(directory, **options):
    with pytest.raises(ModelError) as refused:
        check(directory, **options)
    message = str(refused.value)
    assert len(message.splitlines()) == 1
    return message


def change(directory, **entries):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def change_weights(directory, change_them):
    path = directory / "model.safetensors"
    weights = load_file(path)
    change_them(weights)
    save_file({name: tensor.contiguous().clone() for name, tensor in weights.items()}, path)


def write_safetensors(path, header, data=b""):
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def model(tmp_path):
    return write_tiny_model(tmp_path / "model", tie_embeddings=False)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_tied", [True, False])
def test_directory_is_read_as_the_library_reads_it(tmp_path, family, is_tied):
    model = write_tiny_model(tmp_path, family=family, tie_embeddings=is_tied)
    files, stored = check(model), load_file(model / "model.safetensors")
    assert {name: tensor.shape for name, tensor in files.tensors.items()} == {
        n: tuple(t.shape) for n, t in stored.items()
    }
    name = "model.norm.weight"
    assert b"".join(files.tensors[name].chunks(100)) == stored[name].numpy().tobytes()
    assert (files.vocab_size, files.num_layers, files.dtype) == (64, 2, "float32")
    assert files.shape.parameters() == ModelShape.from_config(model).parameters()


def test_error_is_of_a_backend_and_of_a_configuration(tmp_path):
    with pytest.raises(ModelError) as refused:
        read_model_directory(tmp_path / "absent")
    assert isinstance(refused.value, BackendError) and isinstance(refused.value, ConfigError)
    with pytest.raises(ModelError, match=r"^model=3. Use a directory"):
        read_model_directory(3)


# --------------------------------------------------------------------------------------------------------- layers


def test_surplus_layers_are_refused(tmp_path):
    model = write_tiny_model(tmp_path, num_hidden_layers=4)
    change(model, num_hidden_layers=2)
    assert "its files hold layers 2, 3 beyond num_hidden_layers = 2 of its config.json: they would be" in refusal(model)
    assert "Set num_hidden_layers to 4" in refusal(model)
    change(model, num_hidden_layers=1)
    assert "hold layers 1 to 3 beyond num_hidden_layers = 1" in refusal(model)


def test_missing_layers_are_refused(model):
    change(model, num_hidden_layers=4)
    assert "its files lack layers 2, 3 of the 4 that its config.json states" in refusal(model)


def test_surplus_layers_of_an_unknown_family_are_refused(model):
    change(model, model_type="unheard", architectures=["UnheardForCausalLM"])
    assert check(model).shape is None
    change(model, num_hidden_layers=1)
    assert "hold layer 1 beyond num_hidden_layers = 1" in refusal(model)
    change(model, num_hidden_layers=3)
    assert "lack layer 2 of the 3" in refusal(model)
    change(model, num_hidden_layers=2, vocab_size=32)
    assert "'model.embed_tokens.weight' is (64, 64), vocab_size is 32" in refusal(model)


def test_layers_that_predict_further_tokens_are_not_refused(model):
    """As those that transformers ignores by name of DeepSeek-V3 and GLM-4.5."""

    def add(weights):
        weights["model.layers.2.eh_proj.weight"] = torch.zeros(4, 4)

    change_weights(model, add)
    assert "hold layer 2 beyond" in refusal(model)
    change(model, num_nextn_predict_layers=1)
    files = check(model)
    written = describe_export(files.config, dtype="float32", vocab_size=64, ties_embeddings=False)
    assert written["num_nextn_predict_layers"] == 0


def test_towers_of_other_inputs_have_layers_of_their_own(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps({"model_type": "unheard_vl", "text_config": config, "vision_config": {"num_hidden_layers": 9}})
    )

    def rename(weights):
        for name in list(weights):
            weights[f"language_model.{name}"] = weights.pop(name)
        weights["vision_tower.encoder.layers.8.weight"] = torch.zeros(2)

    change_weights(model, rename)
    assert (check(model).num_layers, check(model).vocab_size) == (2, 64)


# --------------------------------------------------------------------------------------------- parameters and kinds

PARAMETERS = {
    "a missing head": (lambda w: w.pop("lm_head.weight"), "lacks the parameters lm_head.weight. Give a whole"),
    "a missing norm": (lambda w: w.pop("model.norm.weight"), "lacks the parameters model.norm.weight"),
    "a bias": (lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}), "has no place"),
    "an adapter's": (lambda w: w.update({"model.norm.lora_A.weight": torch.zeros(4, 4)}), "has no place"),
    "another shape": (lambda w: w.update({"model.norm.weight": torch.ones(3)}), "which is (3,) and must be (64,)"),
    "a scalar": (lambda w: w.update({"model.norm.weight": torch.ones(())}), "which is () and must be (64,)"),
    "whole numbers": (
        lambda w: w.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
        "is quantised: 'model.norm.weight' is stored as I8",
    ),
    "eight bits": (
        lambda w: w.update({"lm_head.weight": w["lm_head.weight"].to(torch.float8_e4m3fn)}),
        "is quantised: 'lm_head.weight' is stored as F8_E4M3",
    ),
    "packed": (
        lambda w: w.update({"model.layers.0.mlp.up_proj.qweight": torch.zeros(2, dtype=torch.int32)}),
        "is quantised: it holds 'model.layers.0.mlp.up_proj.qweight'",
    ),
    "a score": (lambda w: w.update({"score.weight": w.pop("lm_head.weight")[:1]}), "is a reward model or sequence cl"),
    "a classifier": (lambda w: w.update({"classifier.bias": torch.zeros(2)}), "is a reward model or sequence cl"),
    "a value head": (lambda w: w.update({"value_head.weight": w.pop("lm_head.weight")[:1]}), "is a critic: it holds"),
    "a value head too": (lambda w: w.update({"v_head.summary.weight": torch.zeros(1, 64)}), "is a reward model or"),
}


@pytest.mark.parametrize("damage", PARAMETERS)
def test_weights_of_another_model_are_refused(model, damage):
    hurt, told = PARAMETERS[damage]
    change_weights(model, hurt)
    assert told in refusal(model)


def test_classifier_is_known_by_its_config(tmp_path):
    model = write_tiny_model(tmp_path, architectures=["LlamaForSequenceClassification"])
    assert "is a reward model or sequence classifier (LlamaForSequenceClassification in its" in refusal(model)


def test_critic_is_read_where_one_is_wanted(model):
    check(model, head="value")
    change_weights(model, lambda weights: weights.update({"value_head.weight": weights.pop("lm_head.weight")[:1]}))
    check(model, head="value")
    assert "'value_head.weight' in the place of a head that predicts tokens" in refusal(model)


def test_head_without_rows_is_not_one_label(model):
    change_weights(model, lambda weights: weights.update({"score.weight": weights.pop("lm_head.weight")[0, 0]}))
    for head in ("value", "score"):
        assert "holds 'score.weight' of shape (). One number is needed" in refusal(model, head=head)


def test_buffers_and_the_copy_of_a_tied_head_are_left_alone(tmp_path):
    model = write_tiny_model(tmp_path)

    def add(weights, shift=0.0):
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + shift

    change_weights(model, add)
    check(model)
    change_weights(model, lambda weights: add(weights, shift=1.0))
    assert "config.json ties 'lm_head.weight' to 'model.embed_tokens.weight', but" in refusal(model)


# ------------------------------------------------------------------------------------------------ damaged weights

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
FILES = {
    "empty": lambda path: path.write_bytes(b""),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "cut in its header": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "three bytes": lambda path: path.write_bytes(b"abc"),
    "too long": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "Git LFS": lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"),
    "a web page": lambda path: path.write_text("<!doctype html><html>Sign in</html>" * 10),
    "text": lambda path: path.write_text("weights " * 100),
    "zeros": lambda path: path.write_bytes(bytes(1000)),
    "ZIP": lambda path: path.write_bytes(b"PK\x03\x04" + bytes(100)),
    "pickle": lambda path: path.write_bytes(b"\x80\x02}q\x00" + bytes(100)),
    "GGUF": lambda path: path.write_bytes(b"GGUF" + bytes(100)),
    "huge header": lambda path: path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}"),
    "header no JSON": lambda path: write_safetensors(path, b"{...}"),
    "header a list": lambda path: write_safetensors(path, b"[1, 2]"),
    "header deep": lambda path: write_safetensors(path, b"[" * 100_000),
    "header binary": lambda path: write_safetensors(path, b"\xff" * 20),
    "entry a number": lambda path: write_safetensors(path, {"a": 3}),
    "dtype unheard": lambda path: write_safetensors(path, {"a": ENTRY | {"dtype": "F33"}}, bytes(8)),
    "dtype a list": lambda path: write_safetensors(path, {"a": ENTRY | {"dtype": ["F32"]}}, bytes(8)),
    "shape negative": lambda path: write_safetensors(path, {"a": ENTRY | {"shape": [-2]}}, bytes(8)),
    "shape fractional": lambda path: write_safetensors(path, {"a": ENTRY | {"shape": [2.0]}}, bytes(8)),
    "shape huge": lambda path: write_safetensors(path, {"a": ENTRY | {"shape": [10**30]}}, bytes(8)),
    "shape a text": lambda path: write_safetensors(path, {"a": ENTRY | {"shape": "2"}}, bytes(8)),
    "offsets swapped": lambda path: write_safetensors(path, {"a": ENTRY | {"data_offsets": [8, 0]}}, bytes(8)),
    "offsets three": lambda path: write_safetensors(path, {"a": ENTRY | {"data_offsets": [0, 4, 8]}}, bytes(8)),
    "a gap": lambda path: write_safetensors(path, {"a": ENTRY | {"data_offsets": [8, 16]}}, bytes(16)),
    "shared bytes": lambda path: write_safetensors(path, {"a": ENTRY, "b": ENTRY}, bytes(8)),
    "twice": lambda path: write_safetensors(
        path, f'{{"a": {json.dumps(ENTRY)}, "a": {json.dumps(ENTRY)}}}'.encode(), bytes(8)
    ),
    "metadata a list": lambda path: write_safetensors(path, {"__metadata__": [], "a": ENTRY}, bytes(8)),
    "metadata a number": lambda path: write_safetensors(path, {"__metadata__": {"format": 3}, "a": ENTRY}, bytes(8)),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "a broken link": lambda path: (path.unlink(), path.symlink_to("absent")),
}


@pytest.mark.parametrize("damage", FILES)
def test_weights_that_are_damaged_are_one_line(model, damage):
    FILES[damage](model / "model.safetensors")
    message = refusal(model)
    assert message.count("model.safetensors") == 1
    assert "metadata" not in damage or "__metadata__=" in message


def test_header_of_640_bytes_is_not_a_pickle(model):
    """Its length is written as a pickle begins."""
    path = model / "model.safetensors"
    write_safetensors(path, json.dumps({"a": ENTRY}).encode().ljust(640), bytes(8))
    assert path.read_bytes().startswith(b"\x80\x02")
    assert read_model_directory(model).tensors["a"].shape == (2,)


def write_shards(model):
    """The model in two files; the index."""
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + ('layers' in name)}-of-00002.safetensors" for name in weights}
    for file in {*files.values()}:
        save_file({name: weights[name] for name in weights if files[name] == file}, model / file)
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return index


SHARD = "model-00001-of-00002.safetensors"
SHARDS = {
    "absent": (
        lambda model, index: (model / SHARD).unlink(),
        f"names {SHARD} (1 of 2 files), which the directory lacks",
    ),
    "Git LFS": (lambda model, index: (model / SHARD).write_text("version https://git-lfs.github.com/spec/v1\n"), SHARD),
    "twice": (
        lambda model, index: save_file(
            load_file(model / SHARD.replace("1-", "2-")) | load_file(model / SHARD), model / SHARD
        ),
        "is stored twice, in model-00001-of-00002.safetensors and model-00002-of-00002.safetensors",
    ),
    "no map": (lambda model, index: index.write_text("{}"), "its weight_map maps no names"),
    "map a list": (lambda model, index: index.write_text('{"weight_map": ["a"]}'), "its weight_map maps no names"),
    "map of numbers": (
        lambda model, index: index.write_text('{"weight_map": {"a": 1}}'),
        "its weight_map maps no names",
    ),
    "elsewhere": (lambda model, index: index.write_text('{"weight_map": {"a": "../model.safetensors"}}'), "next to it"),
    "pickles": (
        lambda model, index: index.write_text('{"weight_map": {"a": "pytorch_model.bin"}}'),
        "not a safetensors f",
    ),
    "a pointer": (
        lambda model, index: index.write_text("version https://git-lfs.github.com/spec/v1\n"),
        "Git LFS pointer",
    ),
    "a list": (lambda model, index: index.write_text("[]"), "is not a JSON object but a list"),
    "no index": (
        lambda model, index: index.unlink(),
        "but model-00001-of-00002.safetensors. Save the model again with",
    ),
    "no metadata": (
        lambda model, index: index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]})),
        'has no object "metadata", which transformers needs. Add "metadata": {} to it',
    ),
    "a name more": (
        lambda model, index: index.write_text(index.read_text().replace('"lm_head.weight"', '"other"')),
        "names 'other' in",
    ),
}


@pytest.mark.parametrize("damage", SHARDS)
def test_shards_that_are_damaged_are_one_line(model, damage):
    index = write_shards(model)
    check(model)
    hurt, told = SHARDS[damage]
    hurt(model, index)
    assert told in refusal(model)


def only(directory, name, text=b"x"):
    for path in directory.iterdir():
        path.unlink()
    (directory / name).write_bytes(text)


KINDS = {
    "adapter": (lambda d: (d / "adapter_config.json").write_text("{}"), "holds an adapter (adapter_config.json)"),
    "adapter alone": (lambda d: only(d, "adapter_config.json", b"{}"), "holds an adapter (adapter_config.json)"),
    "GGUF": (lambda d: only(d, "model-Q4_K_M.gguf"), "has no config.json: it holds model-Q4_K_M.gguf. Give"),
    "state": (lambda d: only(d, "state.json"), "is the state of a training backend, not a model. Give an"),
    "empty": (lambda d: [path.unlink() for path in d.iterdir()], "has no config.json: it is empty"),
    "pickled": (
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        "but pytorch_model.bin, whose reading may run any code. Load the model with",
    ),
    "Flax": (lambda d: (d / "model.safetensors").rename(d / "flax_model.msgpack"), "the format of Flax"),
    "only GGUF": (lambda d: (d / "model.safetensors").rename(d / "m.gguf"), "but m.gguf, the format of GGUF"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "holds no safetensors files"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_directory_of_another_kind_is_named(model, kind):
    turn, told = KINDS[kind]
    turn(model)
    assert told in refusal(model)


def test_directory_above_a_model_names_the_model(model):
    """As of a run, and of the hub's cache."""
    assert f"has no config.json. Did you mean {str(model)!r}?" in refusal(model.parent)
    snapshot = model.parent / "models--a--b" / "snapshots"
    snapshot.mkdir(parents=True)
    model.rename(snapshot / "0123")
    assert "Did you mean" in refusal(snapshot.parent) and "0123'?" in refusal(snapshot.parent)


def test_configuration_alone_is_enough_for_a_shape(model):
    (model / "model.safetensors").unlink()
    files = read_model_directory(model, needs_weights=False)
    check_model_directory(files)
    assert files.require_shape().num_layers == 2


def test_end_tokens_outside_the_vocabulary_are_left_out(tmp_path):
    model = write_tiny_model(tmp_path, eos_token_id=3)
    assert read_end_of_sequence_ids(read_model_directory(model)) == {3}
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 99]}))
    assert read_end_of_sequence_ids(read_model_directory(model)) == {7}


@pytest.mark.parametrize(("key", "value"), [("attention_dropout", 2.0), ("attention_dropout", "x"), ("dropout", True)])
def test_dropout_that_is_not_a_share_is_refused(model, key, value):
    change(model, **{key: value})
    assert refusal(model).endswith(f"has {key}={value!r} in its config.json. Use a number from 0 to 1")


def test_home_is_expanded(model, monkeypatch):
    monkeypatch.setenv("HOME", str(model.parent))
    assert find_model("~/model") == model == find_model(Path("~/model"))


# --------------------------------------------------------------------------------------------------------- border


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyError("Unheard"), "x: a library says KeyError: 'Unheard'. Do this"),
        (AttributeError("'int' object has no attribute 'pop'"), "x: a library says 'int' object has no attribute"),
        (RuntimeError("two\nlines of text."), "x: a library says two lines of text. Do this"),
        (Exception(""), "x: a library says Exception. Do this"),
        (type("PanicException", (BaseException,), {})("index out of bounds"), "x: a library says index out of bounds"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (ModuleNotFoundError("No module named 'tiktoken'"), "No module named 'tiktoken'"),
        (RecursionError("maximum recursion depth exceeded"), "maximum recursion depth"),
    ],
)
def test_border_turns_what_a_library_raises_into_one_line(error, told):
    with pytest.raises(ModelError) as refused, errors_of("a library", "x", advice="Do this"):
        raise error
    assert told in str(refused.value) and len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), ModelError("ours")])
def test_border_lets_pass_what_is_not_the_librarys(error):
    with pytest.raises(type(error)) as passed, errors_of("a library", "x"):
        raise error
    assert passed.value is error


def test_warnings_of_a_library_are_not_shown_at_its_border(caplog):
    logger = logging.getLogger("a_library")
    with errors_of("a_library", "x"):
        logging.getLogger("a_library.loading").warning("some weights are new")
    assert not caplog.records
    logger.warning("later")
    assert [record.message for record in caplog.records] == ["later"]


def test_links_that_lead_to_nothing_are_named(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    for target in (tmp_path / "a", tmp_path / "gone"):
        link = tmp_path / "b"
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        with pytest.raises(ModelError, match=f"is a link to '{target}', which leads to nothing. Name a directory"):
            read_model_directory(link)
