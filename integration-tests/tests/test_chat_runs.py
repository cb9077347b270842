"""Runs on chats: where responses end, what the export has of its source, and that padding changes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from chat_tokenizers import build_chat_tokenizer
from hf_engine.testing import write_tiny_model
from small_runs import Outcome, read_metrics, read_samples, without_times

CONFIG = """
[run]
output_dir = "{output}"
iterations = 1
executor = "in_process"
[data]
train = "{data}/train.jsonl"
validation = "{data}/validation.jsonl"
system_prompt = "Answer briefly."
max_eval_rows = 6
[model]
path = "{model}"
[algorithm]
name = "grpo"
[warm_start]
max_steps = 1
batch_size = 8
[optimizer]
actor_learning_rate = 1e-3
[rollout]
batch_size = 4
samples_per_prompt = 2
max_new_tokens = 8
[reward]
function = "small_runs:response_length"
[training]
shard = "root"
[cluster]
gpus_per_machine = 1
"""
NOT_WEIGHTS = {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
ENDS = list(range(100, 150))
"""Of the generation configuration: enough that responses of a random model end at them."""


def write_model(folder: Path, style: str = "llama3", pad: str | None = None) -> Path:
    """A random model in bfloat16 with 320 logits, with files that no library has formatted."""
    tokenizer = build_chat_tokenizer(folder, style, end_is_special=False, pad_token=pad)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "dtype": "bfloat16"}
    files = {name: (folder / name).read_text() for name in NOT_WEIGHTS if (folder / name).exists()}
    write_tiny_model(folder, vocab_size=320, max_positions=128, **ids)
    for name, text in files.items():
        (folder / name).write_text(text.replace("\n", "\n ") if name.endswith(".json") else text)
    (folder / "generation_config.json").write_text(f'{{"eos_token_id":  {ENDS}}}')
    weights = load_file(folder / "model.safetensors")
    halved = {name: tensor.bfloat16() for name, tensor in weights.items()}
    save_file(halved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def train(tmp_path: Path, addition_data: Path, hybridflow: Callable[..., Outcome]) -> Callable[..., Path]:
    def run(model: Path, name: str = "run", *arguments: str) -> Path:
        config = tmp_path / f"{name}.toml"
        config.write_text(CONFIG.format(output=tmp_path / name, data=addition_data, model=model))
        outcome = hybridflow("train", config, *arguments)
        assert outcome.exit_code == 0, outcome.errors
        assert "model.path = " in outcome.output and "logits are beyond its tokenizer's ids" in outcome.output
        return tmp_path / name

    return run


def test_a_run_ends_turns_and_exports_its_source(
    tmp_path: Path, addition_data: Path, train: Callable[..., Path]
) -> None:
    model = write_model(tmp_path / "model")
    run = train(model)
    for name in NOT_WEIGHTS & {path.name for path in model.iterdir()}:
        assert (run / "model" / name).read_bytes() == (model / name).read_bytes(), name
    assert {path.name for path in (run / "model").iterdir()} == {path.name for path in model.iterdir()}
    before, after = (load_file(each / "model.safetensors") for each in (model, run / "model"))
    assert {name: each.dtype for name, each in after.items()} == dict.fromkeys(before, torch.bfloat16)
    assert any(not torch.equal(after[name], before[name]) for name in before)
    assert json.loads((run / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_file(run / "warm_model" / "model.safetensors")["model.norm.weight"].dtype == torch.float32
    responses = [each["response"] for each in read_samples(run, 0)]
    rows = (addition_data / "validation.jsonl").read_text().splitlines()[: len(responses)]
    assert responses == respond(run / "warm_model", [json.loads(row)["prompt"] for row in rows])
    assert any(len(text) < max(map(len, responses)) for text in responses)


def respond(model: Path, questions: list[str]) -> list[str]:
    """Greedy responses of transformers to the same chats."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    end = tokenizer.convert_tokens_to_ids("<|eot|>")
    found = []
    for question in questions:
        chat = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": question}]
        given = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        stops = [*ENDS, end, tokenizer.eos_token_id]
        ids = loaded.generate(**given, do_sample=False, max_new_tokens=8, eos_token_id=stops, pad_token_id=0)
        response = ids[0, given["input_ids"].shape[1] :].tolist()
        found.append(tokenizer.decode(response[:-1] if response[-1] in stops else response, skip_special_tokens=True))
    return found


def test_padding_tokens_change_no_metric(tmp_path: Path, train: Callable[..., Path]) -> None:
    """Also where the EOS is the padding: the end of a response is trained."""
    found = []
    for name, pad in (("none", None), ("own", "<pad>"), ("eos", "<eos>")):
        run = train(write_model(tmp_path / f"{name} model", pad=pad), name)
        found.append((without_times(read_metrics(run)), load_file(run / "model" / "model.safetensors")))
    (metrics, weights), *others = found
    for other_metrics, other_weights in others:
        assert other_metrics == metrics
        assert all(torch.equal(other_weights[name], weights[name]) for name in weights)


def test_another_template_and_dtype_are_exported(tmp_path: Path, train: Callable[..., Path]) -> None:
    model = write_model(tmp_path / "model", style="chatml")
    template = tmp_path / "own.jinja"
    template.write_text("{% for turn in messages %}{{ turn.content }}<|im_end|>\n{% endfor %}")
    run = train(model, "run", "--set", f"data.chat_template={template}", "--set", "model.export_dtype=float32")
    assert (run / "model" / "chat_template.jinja").read_text() == template.read_text()
    assert AutoTokenizer.from_pretrained(run / "model").chat_template == template.read_text()
    assert (run / "model" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    weights = load_file(run / "model" / "model.safetensors")
    assert {each.dtype for each in weights.values()} == {torch.float32}


def test_chats_without_a_template_start_nothing(
    tmp_path: Path, addition_data: Path, hybridflow: Callable[..., Outcome]
) -> None:
    model = write_model(tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(output=tmp_path / "run", data=addition_data, model=model))
    outcome = hybridflow("train", config)
    assert outcome.exit_code == 2
    assert outcome.errors.strip().endswith(
        "has no chat template. Set data.chat_template to a file or a text, or remove data.system_prompt"
    )
    assert len(outcome.errors.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()
    shutil.rmtree(model)
