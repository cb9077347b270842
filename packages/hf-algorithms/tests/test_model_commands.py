"""`generate`, `evaluate` and `export` against transformers, scores computed by hand, and what they refuse."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_algorithms.atomic_files import find_part, writing_lines
from hf_algorithms.checkpoints.origin import describe_origin, write_origin
from hf_algorithms.cli import cli
from hf_algorithms.config import format_toml, parse_config
from hf_algorithms.data import build_character_tokenizer
from hf_algorithms.evaluation.generation import generate
from hf_algorithms.evaluation.model_evaluation import evaluate
from hf_algorithms.models.exporting import export
from hf_algorithms.run_directory import RunDirectory
from hf_engine.testing import write_tiny_model
from hf_protocols import ConfigError, DataError, HybridFlowError, ModelError, RewardError

CONTEXT, LIMIT = 48, 6
RECIPE = """
from dataclasses import replace
from typing import Literal

from hf_algorithms.recipes.grpo import GRPO, GRPOConfig

class MineConfig(GRPOConfig):
    name: Literal["mine"] = "mine"

MINE = replace(GRPO, name="mine", config=MineConfig)
"""
METRICS = """
def length(responses, **kwargs):
    return [float(len(response)) for response in responses]

def even(responses, answers, **kwargs):
    return [None if answer == "skip" else float(len(each) % 2 == 0) for each, answer in zip(responses, answers)]

def silent(responses, **kwargs):
    return [None for _ in responses]
"""
ROWS = [
    {"question": "1+1=", "answer": "2", "level": 1},
    {"question": "37+85=", "answer": "122", "level": {"of": [2]}},
    {"question": "4", "answer": "skip", "level": None},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of characters; it may end a response."""
    directory = write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", max_positions=CONTEXT)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink(missing_ok=True)
    tokenizer = build_character_tokenizer("0123456789+= abcdefgh", directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": tokenizer.eos_token_id}))
    return directory


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of rows in the current folder, which has metrics of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_metrics.py").write_text(METRICS)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    yield path
    sys.modules.pop("own_metrics", None)


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(*words: object) -> tuple[str, BaseException | None]:
    outcome = CliRunner().invoke(cli, [str(word) for word in words])
    return outcome.stdout, outcome.exception


def generate_plainly(model: Path, prompt: str) -> tuple[str, int]:
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    network: Any = AutoModelForCausalLM.from_pretrained(model)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        found = network.generate(**inputs, max_new_tokens=LIMIT, do_sample=False, pad_token_id=tokenizer.eos_token_id)[
            0, inputs["input_ids"].shape[1] :
        ].tolist()
    return tokenizer.decode(found, skip_special_tokens=True), len(found)


def test_greedy_responses_are_those_of_transformers(model: Path, rows: Path) -> None:
    output, error = run("generate", model, "--data", rows, "--output", "new/out.jsonl", "--max-new-tokens", LIMIT)
    assert error is None
    found = read(Path("new/out.jsonl"))
    assert [{key: row[key] for key in ROWS[0]} for row in found] == ROWS
    for row in found:
        text, tokens = generate_plainly(model, row["prompt"])
        (response,) = row["responses"]
        assert (response["text"], response["tokens"]) == (text, tokens)
        assert response["finish_reason"] == ("length" if tokens == LIMIT else "stop")
        assert row["prompt"] == row["question"]
    assert output.startswith("3 rows, 3 responses of ")
    assert not find_part("new/out.jsonl").exists()


def test_samples_follow_from_seed_and_row(model: Path, rows: Path) -> None:
    how: dict[str, Any] = {"data": rows, "samples": 3, "max_new_tokens": LIMIT}
    generate(model, output="one.jsonl", **how)
    generate(model, output="again.jsonl", **how)
    result = generate(model, output="other.jsonl", seed=1, **how)
    one, again, other = (read(Path(name)) for name in ("one.jsonl", "again.jsonl", "other.jsonl"))
    assert one == again != other
    assert [len(row["responses"]) for row in one] == [3, 3, 3]
    assert (result.rows, result.responses) == (3, 9)
    assert result.tokens == sum(each["tokens"] for row in other for each in row["responses"])


def test_an_interruption_keeps_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"

    def write_and_stop() -> None:
        with writing_lines(path) as write:
            write(["1", "2"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_stop()
    assert not path.exists()
    assert find_part(path).read_text() == "1\n2\n"


def test_scores_are_those_computed_by_hand(model: Path, rows: Path) -> None:
    Path("easy.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    output, error = run(
        *("evaluate", model, "--data", rows, "--data", "small=easy.jsonl", "--samples", 4, "--temperature", 1.5),
        *("--metric", "own_metrics.py:length", "--metric", "own_metrics:even", "--metric", "exact_match"),
        *("--max-new-tokens", LIMIT, "--output", "kept", "--json"),
    )
    assert error is None
    body = json.loads(output)
    assert body == json.loads(Path("kept/evaluation.json").read_text())
    assert body["sets"].keys() == {"rows", "small"}
    samples = read(Path("kept/rows.jsonl"))
    assert [(each["row"], each["sample"]) for each in samples] == [
        (row, number) for row in range(3) for number in range(4)
    ]
    lengths = [[len(each["response"]) for each in samples if each["row"] == row] for row in range(3)]
    metrics = body["metrics"]
    assert (
        metrics["eval/rows/length"] == metrics["eval/rows/length/avg@4"] == pytest.approx(sum(map(sum, lengths)) / 12)
    )
    assert "eval/rows/length/pass@4" not in metrics
    even = [[length % 2 == 0 for length in row] for row in lengths[:2]]
    assert metrics["eval/rows/even/avg@4"] == pytest.approx(sum(map(sum, even)) / 8)
    assert metrics["eval/rows/even/pass@4"] == sum(map(any, even)) / 2
    assert body["sets"]["rows"]["metrics"]["even"]["unscorable"] == 1
    assert [each["scores"]["even"] for each in samples][8:] == [None] * 4
    assert (
        metrics["eval/small/exact_match"] == sum(each["response"] == "2" for each in read(Path("kept/small.jsonl"))) / 4
    )


def test_numbers_are_printed_with_their_intervals(model: Path, rows: Path) -> None:
    output, error = run("evaluate", model, "--data", f"mine={rows}", "--metric", "own_metrics.py:even", "--rows", 2)
    assert error is None
    first, second = output.splitlines()
    assert first.startswith("mine  even  mean ")
    assert first.endswith("  2 rows")
    assert second.startswith("mine  responses of ")


TOO_LONG = (
    r"line 2: its prompt of 6 tokens and a response of up to 43 \(--max-new-tokens\) are above the model's context of "
    "48 tokens. Shorten the prompt, or lower --max-new-tokens to at most 42"
)
EXACT = ("--metric", "exact_match")
EVALUATE = ("evaluate", "{model}", "--data", "rows.jsonl")
GENERATE = ("generate", "{model}", "--data", "rows.jsonl", "--output")


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        ((*GENERATE, "out", "--max-new-tokens", 43), ConfigError, TOO_LONG),
        ((*GENERATE, "rows.jsonl"), ConfigError, "--output 'rows.jsonl': exists"),
        ((*GENERATE, "old"), ConfigError, "old.part is there, with the rows of a command that was interrupted"),
        ((*GENERATE, "rows.jsonl/out"), ConfigError, "rows.jsonl is not a folder"),
        ((*GENERATE, "out", "--backend", "vlm"), ConfigError, "^--backend 'vlm': .* Did you mean 'vllm'"),
        ((*GENERATE, "out", "--option", "cachebytes=3"), ConfigError, "did you mean 'cache_bytes'"),
        ((*GENERATE, "out", "--option", "cache_bytes=9"), ConfigError, "^--option cache_bytes=9: a row of 48 tokens"),
        ((*GENERATE, "out", "--option", "cachebytes"), ConfigError, "--option 'cachebytes'. Write it as NAME=VALUE"),
        ((*GENERATE, "out", "--samples", 2, "--temperature", 0), ConfigError, "^--samples 2: at temperature = 0"),
        ((*GENERATE, "out", "--temperature", 1e-9), ConfigError, "^--temperature 1e-09: must be 0 or at least 1e-06"),
        (("generate", "absent", *GENERATE[2:], "out"), ConfigError, "model = 'absent': "),
        (("generate", "adapter", *GENERATE[2:], "out"), ConfigError, "model = 'adapter': "),
        (("generate", "run", *GENERATE[2:], "out"), ConfigError, "model = 'run': is a run without model/"),
        (EVALUATE, ConfigError, "^--metric is missing. Name a function"),
        ((*EVALUATE[:2], "--metric", "exact_match"), ConfigError, "^--data is missing. Name a file"),
        ((*EVALUATE, "--data", "./rows.jsonl", *EXACT), ConfigError, "'rows.jsonl' is named 'rows' as well"),
        ((*EVALUATE[:2], "--data", "x=absent.jsonl", *EXACT), DataError, "absent.jsonl: no such file"),
        ((*EVALUATE, "--metric", "exact_mach"), ConfigError, "does not name a function.*Did you mean exact_match"),
        ((*EVALUATE, "--metric", "own_metrics:odd"), ConfigError, "odd does not exist"),
        ((*EVALUATE, *EXACT, "--metric", "hf_algorithms.rewards:exact_match"), ConfigError, "same name 'exact_match'"),
        ((*EVALUATE, *EXACT, *EXACT), ConfigError, "names .exact_match. twice. Name it once"),
        ((*EVALUATE, "--metric", "exact_match", "--output", "."), ConfigError, "^--output '.': is not empty"),
        ((*EVALUATE, "--metric", "own_metrics:silent"), RewardError, "'silent' scored none of the 3 rows"),
        ((*EVALUATE, *EXACT, "--prompt-field", "q"), DataError, "has no field 'q'; .* Correct --prompt-field"),
        ((*EVALUATE, *EXACT, "--chat-template", "no.jinja"), ConfigError, "^--chat-template 'no.jinja': cannot"),
        (("export", "{model}", "--output", "run"), ConfigError, "^--output 'run': is not an empty directory"),
        (("export", "{model}", "--output", "x", "--iteration", 3), ConfigError, "is not a run"),
        (("export", "orphan", "--output", "x"), ConfigError, "'orphan': is an adapter of './gone': no such directory"),
        (("export", "done", "--output", "x", "--iteration", 3), ConfigError, "but those of 2, 4. Choose one"),
    ],
)  # fmt: skip
def test_refusals_are_one_line(
    model: Path, rows: Path, words: tuple[object, ...], kind: type[HybridFlowError], message: str
) -> None:
    Path("old.part").touch()
    for name in ("run", "done/model", "done/steps/2", "adapter", "orphan"):
        Path(name).mkdir(parents=True)
    for name in ("run/config.toml", "done/config.toml", "done/steps/2/config.json"):
        Path(name).touch()
    Path("done/summary.json").write_text('{"model_iteration": 4}')
    Path("adapter/adapter_config.json").write_text("{}")
    Path("orphan/adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "./gone"}')
    Path("orphan/adapter_model.safetensors").touch()
    before = sorted(rows.parent.rglob("*"))
    output, error = run(*(str(model) if word == "{model}" else word for word in words))
    assert output == ""
    assert isinstance(error, kind), error
    with pytest.raises(kind, match=message):
        raise error
    assert "\n" not in str(error)
    assert [
        path for path in sorted(rows.parent.rglob("*")) if path.suffix != ".pyc" and path.name != "__pycache__"
    ] == before


def test_an_exported_model_loads_like_its_source(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert run("export", model, "--output", tmp_path / "out")[0] == f"{tmp_path / 'out'}\n"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in model.iterdir()}
    assert generate_plainly(tmp_path / "out", "1+1=") == generate_plainly(model, "1+1=")


def test_an_adapter_is_merged_into_its_base(model: Path, rows: Path) -> None:
    base: Any = AutoModelForCausalLM.from_pretrained(model)
    base.config._name_or_path = str(model)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], base_model_name_or_path=str(model))
    adapted = peft.get_peft_model(base, config)
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained("adapter")
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        wanted = adapted(ids).logits
    export("adapter", output_dir="alone")
    export("adapter", output_dir="merged", merge=True)
    assert (Path("alone/adapter_config.json").is_file(), Path("alone/config.json").exists()) == (True, False)
    merged: Any = AutoModelForCausalLM.from_pretrained("merged")
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, wanted, rtol=1e-4, atol=1e-4)
    AutoTokenizer.from_pretrained("merged")
    generate("adapter", data=rows, output="out.jsonl", max_new_tokens=2)
    assert len(read(Path("out.jsonl"))) == 3


def test_a_damaged_adapter_is_read_after_data_and_metrics(model: Path, rows: Path) -> None:
    """Merging takes minutes at 7B: what can be known before is refused before."""
    Path("adapter").mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(model)}
    Path("adapter/adapter_config.json").write_text(json.dumps(config))
    Path("adapter/adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="Did you mean exact_match"):
        evaluate("adapter", data={"mine": rows}, metrics=["exact_mach"])
    with pytest.raises(DataError, match=r"absent\.jsonl: no such file"):
        generate("adapter", data="absent.jsonl", output="out.jsonl")
    with pytest.raises(ModelError, match=r"'adapter': adapter_model\.safetensors cannot be read"):
        export("adapter", output_dir="copy")
    assert not Path("copy").exists()
    with pytest.raises(HybridFlowError, match=r"'adapter': adapter_model\.safetensors cannot be read"):
        evaluate("adapter", data={"mine": rows}, metrics=["exact_match"])


def write_run(model: Path, rows: Path, **own: dict[str, str]) -> None:
    """Makes the directory `run` of a run with `model` as its model, and sections of its own."""
    sections = {
        "run": {"output_dir": "run"},
        "data": {"train": "rows.jsonl"},
        "model": {"path": str(model)},
        "reward": {"function": "exact_match"},
        "rollout": {"max_new_tokens": 2},
        **own,
    }
    config = parse_config(sections, search_path=[str(rows.parent)])
    directory = RunDirectory(Path("run"))
    origin = describe_origin(config, directory.path, [str(rows.parent)])
    directory.begin()
    write_origin(directory, origin)
    directory.write_text("config.toml", format_toml(config))
    directory.write_text("metrics.jsonl", '{"iteration": 1, "reward/mean": 0.5}\n')
    directory.close()
    shutil.copytree(model, "run/model")


def test_a_run_is_evaluated_from_any_folder(model: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows its rows, and the folders of its metric and of its recipe, as `--resume` does."""
    Path("own_recipes.py").write_text(RECIPE)
    reward = {"function": "exact_match", "metric": "own_metrics.py:length"}
    write_run(model, rows, algorithm={"recipe": "own_recipes.py:MINE"}, reward=reward)
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert evaluate("../run").metrics[0].keys() == {"set", "eval/test/length"}


def test_a_configuration_describes_the_run(model: Path, rows: Path) -> None:
    write_run(model, rows)
    found = evaluate(config="run/config.toml", output_dir="scores")
    assert (found.run_dir, found.model_dir) == (Path("run"), Path("run/model"))
    assert found.metrics == [{"set": "test", **found.summary["metrics"]}]
    assert json.loads(Path("scores/evaluation.json").read_text()) == json.loads(json.dumps(found.summary))
    exported = export(config="run/config.toml", output_dir="exported")
    assert (exported.run_dir, exported.model_dir, os.fspath(exported)) == (Path("run"), Path("exported"), "exported")
    assert exported.metrics == [{"iteration": 1, "reward/mean": 0.5}] and exported.summary["merged"] is False
    fresh = {"data": {"train": str(rows)}, "model": {"path": str(model)}, "reward": {"function": "exact_match"}}
    assert evaluate(config=fresh, max_new_tokens=2).metrics[0].keys() == {"set", "eval/test/exact_match"}
    assert evaluate(exported, config=fresh, max_new_tokens=2).model == "exported"
    other = fresh | {"run": {"output_dir": "no-run"}}
    assert export(config=other, set={"run.output_dir": "run"}, output_dir="again").run_dir == Path("run")


def test_values_of_set_come_last(model: Path, rows: Path) -> None:
    write_run(model, rows)
    found = evaluate("run", set={"reward.metric": "own_metrics.py:length", "rollout.max_new_tokens": 1})
    assert found.metrics[0].keys() == {"set", "eval/test/length"} and found.sets["test"].response_tokens == 1
    drawn = {"rollout.temperature": 1.5, "run.seed": 3, "rollout.max_new_tokens": LIMIT}
    result = generate("run", data=rows, output_dir="made", set=drawn)
    same = generate("run", data=rows, output="same.jsonl", temperature=1.5, seed=3, max_new_tokens=LIMIT)
    greedy = generate("run", data=rows, output="greedy.jsonl", max_new_tokens=LIMIT)
    assert result.output == Path("made/responses.jsonl") and result.summary["rows"] == 3
    assert read(result.output) == read(same.output) != read(greedy.output)
    assert (result.run_dir, result.model_dir) == (Path("run"), Path("run/model"))
    assert result.metrics == [
        {"responses": 3, "response/tokens": result.tokens / 3, "response/truncated": result.truncated / 3}
    ]


def test_what_does_not_fit_a_configuration_is_refused(model: Path, rows: Path) -> None:
    write_run(model, rows)
    warm = {"rollout.temperature": 1.0}
    for message, call in (
        ("model is missing. Pass a directory", lambda: evaluate(data=rows, metrics="exact_match")),
        ("model is missing: config has no model.path", lambda: evaluate(config={"data": {"train": str(rows)}})),
        ("is not a run. Pass config", lambda: evaluate(model, data=rows, metrics="exact_match", set=warm)),
        ("temperature, and set 'rollout.temperature': both", lambda: evaluate("run", temperature=0.5, set=warm)),
        ("rollout.temperature = 'hot': must be a number", lambda: evaluate("run", set={"rollout.temperature": "hot"})),
        ("unknown key 'rollout.warmth'", lambda: evaluate("run", set={"rollout.warmth": 1.0})),
        ("model is missing", lambda: evaluate(config={"run": [3]})),
        ("model is missing", lambda: evaluate(set=warm)),
        ("set = 3: is not a mapping", lambda: evaluate("run", set=3)),
        ("config = 3: is not a path", lambda: evaluate("run", config=3)),
        ("output, output_dir: both are given", lambda: generate("run", data=rows, output="a", output_dir="b")),
        ("absent.toml", lambda: export(config="absent.toml", output_dir="made")),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as refused:
            call()
        assert message in str(refused.value) and "\n" not in str(refused.value)
    assert not Path("made").exists()


@pytest.mark.parametrize("given", [{"rows": -1}, {"rows": 0}, {"samples": "4"}, {"max_new_tokens": 0}])
def test_counts_of_python_are_named_by_their_argument(model: Path, given: dict[str, Any]) -> None:
    (name, value) = next(iter(given.items()))
    with pytest.raises(ConfigError, match=f"^{name}={value!r} must be a whole number of at least 1$"):
        evaluate(model, data=[{"prompt": "1", "answer": "2"}], metrics="exact_match", **given)


def test_rows_of_python_are_named_by_their_keys(model: Path, rows: Path) -> None:
    progress: list[tuple[str, int, int]] = []
    show: Callable[[str, int, int], None] = lambda *each: progress.append(each)  # noqa: E731
    result = evaluate(model, data={"mine": rows}, metrics=["exact_match"], max_new_tokens=2, rows=2, on_progress=show)
    assert result.metrics[0].keys() == {"set", "eval/mine/exact_match"}
    assert progress == [("mine", 2, 2)]


def test_an_unpaired_surrogate_in_a_column_is_written(model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "note": "\\ud83d"}\n{"prompt": "2", "note": "\u00e9"}\n')
    generate(model, data=str(tmp_path / "rows.jsonl"), output=tmp_path / "out.jsonl", max_new_tokens=2)
    assert [each["note"] for each in read(tmp_path / "out.jsonl")] == ["\ud83d", "\u00e9"]
    function = {"length": lambda completions, **_: [len(each) for each in completions]}
    found = evaluate(model, data=str(tmp_path / "rows.jsonl"), metrics=function, output_dir=tmp_path / "kept")
    assert len(read(tmp_path / "kept" / "rows.jsonl")) == found.sets["rows"].rows == 2
