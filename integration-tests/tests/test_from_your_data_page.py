"""The tutorial "From your data to a model" as written, with a tiny model of Qwen2's family in a folder of its own."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from transformers import AutoModelForCausalLM, Qwen2Config

from chat_tokenizers import build_chat_tokenizer
from small_runs import Outcome, read_metrics

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "from-your-data-to-a-model.md").read_text()
COMMANDS = "".join(re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)).splitlines()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The files of the page, and its model."""
    tokenizer = build_chat_tokenizer(tmp_path / "qwen", "chatml")
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
                         eos_token_id=tokenizer.eos_token_id)  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "qwen")
    for name, block in re.findall(
        r"`([\w.]+\.(?:jsonl|toml|py))`[^\n]*(?:\n[^\n`]+)*\n\n```\w+\n(.*?)```", PAGE, re.DOTALL
    ):
        (tmp_path / name).write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    sys.modules.pop("rewards", None)


def test_commands_go_the_whole_way(folder: Path, hybridflow: Callable[..., Outcome]) -> None:
    assert [command.split()[1] for command in COMMANDS] == ["data", "sft", "train", "evaluate", "evaluate", "export"]
    outcomes = []
    for command in COMMANDS:
        outcomes.append(hybridflow(*command.split()[1:]))
        assert outcomes[-1].exit_code == 0, outcomes[-1].errors
    checked, *_, sampled, _ = outcomes
    assert "solution" in checked.output and "<|im_end|>" in checked.output
    summary = json.loads((folder / "runs" / "sft" / "summary.json").read_text())
    assert summary["score_after"] < summary["score_before"]
    metrics = read_metrics(folder / "runs" / "grpo")
    assert [row["iteration"] for row in metrics] == [1, 2, 3, 4] and all("reward/short/mean" in row for row in metrics)
    assert (folder / "runs" / "grpo" / "model" / "adapter_config.json").is_file()
    assert "avg@4" in sampled.output and "pass@4" in sampled.output, sampled.output
    exported, tuned = (AutoModelForCausalLM.from_pretrained(each) for each in ("my-model", "runs/sft/model"))
    weights, before = exported.state_dict(), tuned.state_dict()
    assert weights.keys() == before.keys(), "a whole model, without adapters"
    assert any(not torch.equal(weights[name], before[name]) for name in before if "q_proj" in name)
    names: dict[str, Any] = {}
    exec(compile((folder / "load.py").read_text(), "load.py", "exec"), names)
    assert names["ids"]["input_ids"].shape[0] == 1


REFUSED = """from hf_algorithms import sft
sft("qwen", [{"prompt": "1"}, 2], output_dir="refused")"""
FAILING = """from hf_algorithms import train
def fails(completions, **_):
    raise ValueError("on purpose")
train(tuned.model_dir, data, fails, set=short | {"rollout.batch_size": 4, "rollout.max_new_tokens": 4})"""


def read_last_line(outputs: list[Any]) -> str:
    """Returns the last line that a cell printed."""
    printed = [each.text for each in outputs if each.output_type == "stream" and each.name == "stdout"]
    return str("".join(printed).strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(900)  # a kernel imports everything again
def test_a_notebook_goes_the_same_way(folder: Path) -> None:
    """In a real kernel, which goes on after cells that raise."""
    _, _, rest = PAGE.partition("## The same in a notebook")
    first, *others = re.findall(r"```python\n(.*?)```", rest, re.DOTALL)
    assert len(others) == 2
    raising = {"tags": ["raises-exception"]}
    notebook = new_notebook(
        cells=[
            new_code_cell(REFUSED, metadata=raising),
            new_code_cell(first),
            new_code_cell(FAILING, metadata=raising),
            *map(new_code_cell, others),
            new_code_cell(
                "found = scores.metrics[0]\n"
                "len(result.metrics), found.pop('set'), all(0 <= value <= 1 for value in found.values())"
            ),
        ]
    )
    NotebookClient(notebook, timeout=None, startup_timeout=250, resources={"metadata": {"path": str(folder)}}).execute()
    refused, _, failed, trained, evaluated, last = [cell.outputs for cell in notebook.cells]
    assert refused[-1].ename == "DataError" and "row 2" in refused[-1].evalue and not (folder / "refused").exists()
    assert refused[-1].traceback == [f"DataError: {refused[-1].evalue}"], "one line, without our frames"
    cells = [refused, failed, trained, evaluated, last]
    assert not [each.text for cell in cells for each in cell if each.output_type == "stream" and each.name == "stderr"]
    assert failed[-1].output_type == "error" and "on purpose" in failed[-1].evalue
    assert list(map(type, json.loads(read_last_line(trained)))) == [float] * 4
    assert "eval/held_out/names_the_number" in read_last_line(evaluated)
    assert last[-1].data["text/plain"] == "(4, 'held_out', True)"
    assert (folder / "notebook-model" / "model.safetensors").is_file()
    assert not (folder / "notebook-model" / "adapter_config.json").exists()
