"""`hybridflow data`: the report of a file, and the example sets."""

from __future__ import annotations

import json
import operator
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from transformers import LlamaConfig

from chat_tokenizers import build_chat_tokenizer
from hf_algorithms.cli import cli
from hf_algorithms.config import ModelConfig, load_config
from hf_algorithms.data import build_character_tokenizer, load_rows
from hf_algorithms.models.initial_model import build_initial_model
from hf_algorithms.preflight.inputs import load_inputs
from hf_protocols.errors import ConfigError, DataError, ModelError
from hf_protocols.toml import format_toml_value

GSM8K = Path(__file__).resolve().parents[4] / "shared" / "data" / "gsm8k"


def run(*words: str) -> str:
    result = CliRunner().invoke(cli, ["data", *words], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


SIDES = ("chosen", "rejected")
ONE_LAYER = {"hidden_size": 8, "intermediate_size": 16, "num_layers": 1, "num_heads": 1}


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    records = [{"question": "1+1=", "answer": 2.50, "level": 1}, {"question": "11+11=", "level": 2}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_a_report_without_a_model_counts_characters(rows: str) -> None:
    report = json.loads(run("check", rows, "--json"))
    assert report["files"] == [
        {
            "path": rows,
            "format": "JSONL",
            "rows": 2,
            "weight": None,
            "kind": "prompts",
            "prompt": "question",
            "answer": "answer",
            "columns": ["question", "level"][1:],
        }
    ]
    assert (report["rows"], report["without_answer"], report["too_long"]) == (2, 1, None)
    first = {"where": f"{rows}, line 1", "prompt": "1+1=", "answer": "2.5", "columns": {"level": 1}}
    assert report["first"] == {**first, "text": None, "ids": None}
    assert (report["lengths"]["least"], report["lengths"]["most"], report["lengths"]["total"]) == (4, 6, 10)


def test_a_report_is_json_that_every_reader_takes(tmp_path: Path) -> None:
    """JSON has no NaN; Python reads it in files, and writes it, too."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2", "level": NaN, "more": [Infinity, 1.5]}')
    constants: list[str] = []
    report = json.loads(run("check", str(path), "--json"), parse_constant=constants.append)
    assert constants == []
    assert report["first"]["columns"] == {"level": "NaN", "more": ["Infinity", 1.5]}


def test_a_report_with_a_tokenizer_has_ids_and_what_is_left_out(rows: str, tmp_path: Path) -> None:
    tokenizer = build_character_tokenizer("0123456789+=", tmp_path / "tokenizer")
    words = ("check", rows, "--model", str(tmp_path / "tokenizer"), "--max-prompt-tokens", "5", "--too-long", "drop")
    report = json.loads(run(*words, "--json"))
    assert report["first"]["ids"] == tokenizer("1+1=")["input_ids"]
    assert report["first"]["text"] == "1+1="
    assert report["lengths"] == {
        "unit": "tokens of a prompt",
        "least": 4,
        "median": 5.0,
        "mean": 5.0,
        "most": 6,
        "total": 10,
    }
    assert report["too_long"] == {"limit": 5, "rows": 1, "action": "drop"}
    lines = run(*words).splitlines()
    assert lines[0] == f"{rows}: JSONL, 2 rows"
    assert "  its 4 ids: 4 13 4 14" in lines
    assert "rows without an answer: 1" in lines
    assert lines[-1] == "prompts above 5 tokens: 1 of 2; left out (data.too_long = 'drop')"


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"text": "1+1=2"}, "rows: texts; prompt = none, text = 'text'"),
        (
            {name: [{"role": "user", "content": "a"}, {"role": "assistant", "content": name}] for name in SIDES},
            "rows: preferences; prompt = none, answer = none",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}]},
            "rows: chats; prompt = 'messages', answer = the last message, where it is the assistant's",
        ),
        ({"prompt": "What?", "image": "a.png"}, "other columns: image; models read text only, not 'image'"),
    ],
)
def test_every_kind_of_row_has_a_report(tmp_path: Path, record: dict[str, Any], says: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    assert says in run("check", str(tmp_path / "a.jsonl"))


def test_the_context_of_the_model_bounds_prompts(rows: str, tmp_path: Path) -> None:
    config = ModelConfig.model_validate({"tokenizer": "characters", "max_positions": 9, **ONE_LAYER})
    build_initial_model(config, load_rows(rows), directory=tmp_path / "model", seed=0)
    words = ("check", rows, "--model", str(tmp_path / "model"), "--max-new-tokens")
    found = CliRunner().invoke(cli, ["data", *words, "4", "--json"], standalone_mode=False)
    assert json.loads(found.stdout)["too_long"] == {"limit": 5, "rows": 1, "action": "error"}
    assert isinstance(found.exception, DataError), "and then fails as a run does"
    assert str(found.exception).startswith(f"{rows}: 1 of 2 prompts have more than 5 tokens, so a run refuses the rows")
    assert str(found.exception).endswith("lower --max-new-tokens, or set --too-long to drop or cut such prompts")
    with pytest.raises(ConfigError, match=r"^--max-new-tokens 9: the model's context of 9 tokens has no room"):
        run(*words, "9")
    report = run(*words[:-1])
    assert "room: 9 tokens, less 3 for a response (rollout.max_new_tokens; 256, its default, does not fit), are 6" in (
        report
    ), "what the longest prompt leaves"
    assert "prompts above 6 tokens: 0 of 2" in report


def test_an_adapter_is_read_as_its_base(rows: str, tmp_path: Path) -> None:
    config = ModelConfig.model_validate({"tokenizer": "characters", "max_positions": 9, **ONE_LAYER})
    build_initial_model(config, load_rows(rows), directory=tmp_path / "model", seed=0)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").touch()
    words = ("check", rows, "--max-new-tokens", "2", "--json", "--model")
    for base in ("model", "absent"):
        about = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / base)}
        (adapter / "adapter_config.json").write_text(json.dumps(about))
        if base == "model":
            assert run(*words, str(adapter)) == run(*words, str(tmp_path / "model"))
    with pytest.raises(ModelError, match=rf"^--model {adapter}: is an adapter of '.*absent': no such directory"):
        run(*words, str(adapter))


def test_the_report_shows_the_template_and_where_turns_end(tmp_path: Path) -> None:
    tokenizer = build_chat_tokenizer(tmp_path / "model", "phi3")
    eos, end = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|end|>")
    LlamaConfig(vocab_size=400, eos_token_id=end, max_position_embeddings=300).save_pretrained(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "What is 1?"}]}\n')
    words = ("check", str(tmp_path / "a.jsonl"), "--model", str(tmp_path / "model"), "--system-prompt", "Be brief.")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1?"}]
    own = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    report = json.loads(run(*words, "--json"))
    assert report["first"]["ids"] == own
    assert report["lengths"]["most"] == len(own)
    stops = {each["token_id"]: each["stated_by"] for each in report["turns"]["stops"]}
    assert stops == {eos: ["tokenizer"], end: ["config.json", "chat template"]}
    lines = run(*words, "--chat-template", "{{ messages[-1].content }}<eos>").splitlines()
    assert "chat template: data.chat_template" in lines
    assert f"responses end at: <eos> ({eos}), of tokenizer and chat template; <|end|> ({end}), of config.json" in lines
    assert f"{400 - len(tokenizer)} logits are beyond the tokenizer's ids and have no text" in lines


def test_options_of_the_template_reach_it(tmp_path: Path) -> None:
    tokenizer = build_chat_tokenizer(tmp_path / "model", "phi3")
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "1"}]}\n')
    template = "{{ messages[-1].content }}{% if think %}<think>{% endif %}{{ depth + 1 }}{{ word }}"
    words = ("check", str(tmp_path / "a.jsonl"), "--model", str(tmp_path / "model"), "--chat-template", template)
    options = ("think=false", "depth=2", "word=much")
    report = json.loads(run(*words, *chain.from_iterable(("--template-option", each) for each in options), "--json"))
    assert report["first"]["text"] == "13much"
    assert list(report["first"]["ids"]) == tokenizer("13much")["input_ids"]
    with pytest.raises(ConfigError, match=r"^--template-option has tokenize, which is not a variable of a chat"):
        run(*words, "--template-option", "tokenize=true")
    with pytest.raises(ConfigError, match=r"^--template-option 'think'. Write it as NAME=VALUE, such as enable_think"):
        run(*words, "--template-option", "think")


def test_a_model_with_fewer_logits_than_ids_is_refused(rows: str, tmp_path: Path) -> None:
    build_character_tokenizer("0123456789+=", tmp_path / "model")
    LlamaConfig(vocab_size=9).save_pretrained(tmp_path / "model")
    with pytest.raises(
        ModelError, match=r"^--model .*: its tokenizer has the token '=' with id 14, the model's embedding"
    ):
        run("check", rows, "--model", str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("config.json", {"dtype": "bfloat17"}, "has dtype='bfloat17' in its config.json, which no weights have"),
        ("config.json", {"num_hidden_layers": 2.5}, "has num_hidden_layers=2.5 in its config.json. Use a whole"),
        ("generation_config.json", {"eos_token_id": "x"}, "generation_config.json has eos_token_id='x'. Use a token"),
    ],
)
def test_a_models_damaged_configuration_is_named(
    tmp_path: Path, rows: str, file: str, content: dict[str, Any], reason: str
) -> None:
    LlamaConfig(vocab_size=64).save_pretrained(tmp_path / "model")
    build_character_tokenizer("0123456789+=", directory=tmp_path / "model")
    path = tmp_path / "model" / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | content))
    with pytest.raises(ModelError, match=re.escape(f"--model {tmp_path / 'model'}: {reason}")):
        run("check", rows, "--model", str(tmp_path / "model"))


def test_options_about_tokens_need_a_model(rows: str) -> None:
    for words in (("--max-new-tokens", "3"), ("--template-option", "a=1"), ("--too-long", "drop")):
        with pytest.raises(ConfigError, match=rf"^{words[0]}: without a model no tokens are counted"):
            run("check", rows, *words)


def test_texts_are_reported_with_their_blocks(tmp_path: Path) -> None:
    build_character_tokenizer("0123456789+=", tmp_path / "tokenizer")
    (tmp_path / "a.jsonl").write_text('{"text": "1+1=2"}\n{"text": "12"}\n')
    words = ("check", str(tmp_path / "a.jsonl"), "--model", str(tmp_path / "tokenizer"))
    assert json.loads(run(*words, "--json"))["blocks"] is None, "a tokenizer alone has no context"
    report = json.loads(run(*words, "--block-tokens", "4", "--json"))
    assert (report["lengths"]["most"], report["lengths"]["total"]) == (6, 9)
    assert report["blocks"] == {"block_tokens": 4, "blocks": 3}


SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_layers": 1, "num_heads": 1, "max_positions": 24}


def write_config(folder: Path, **sections: dict[str, Any]) -> str:
    body = {"model": {"tokenizer": "characters", **SIZES}, **sections}
    lines = [f"[{name}]\n" + "".join(f"{k} = {format_toml_value(v)}\n" for k, v in table.items())
             for name, table in body.items()]  # fmt: skip
    (folder / "run.toml").write_text("\n".join(lines))
    return str(folder / "run.toml")


def test_a_configuration_is_checked_as_its_run_reads_it(tmp_path: Path) -> None:
    files = {
        "a": [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(8, 14)],
        "b": [{"question": "1" * 20, "answer": "1"}, {"question": "2=", "answer": "2"}],
        "texts": [{"text": "12345"}],
    }
    for name, records in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    a, b, texts = (str(tmp_path / f"{name}.jsonl") for name in files)
    train = [{"path": a, "weight": 3.0}, {"path": b, "weight": 1.0}]
    config = write_config(
        tmp_path,
        data={"train": train, "validation": a, "max_eval_rows": 4, "too_long": "drop", "pretraining": texts},
        rollout={"max_new_tokens": 6},
    )
    reports = json.loads(run("check", "--config", config, "--json"))
    assert list(reports) == ["train", "validation", "pretraining"], "the test set is that of validation"
    assert [file["weight"] for file in reports["train"]["files"]] == [3.0, 1.0]
    room = {"context": 24, "max_new_tokens": 6, "prompt": 18, "is_lowered": False}
    assert reports["train"]["room"] == room
    assert reports["train"]["too_long"] == {"limit": 18, "rows": 1, "action": "drop"}
    assert (reports["validation"]["rows"], reports["validation"]["files"][0]["rows"]) == (4, 6)
    assert reports["pretraining"]["blocks"] == {"block_tokens": 24, "blocks": 1}
    inputs = load_inputs(load_config(Path(config)), tmp_path / "model")
    assert reports["train"]["lengths"]["most"] == inputs.train.longest
    assert reports["train"]["too_long"]["rows"] == inputs.train.num_too_long
    first = inputs.train.prompts([0])["prompt_ids"].unbind()[0].tolist()
    assert list(reports["train"]["first"]["ids"]) == first
    lines = run("check", "--config", config, "--set", "rollout.max_new_tokens=3").splitlines()
    assert "  room: 24 tokens, less 3 for a response (rollout.max_new_tokens), are 21 for a prompt" in lines
    assert f"  {b}: JSONL, 2 rows, weight 1" in lines
    assert "  the first 4 rows are used (data.max_eval_rows)" in lines
    with pytest.raises(ConfigError, match=r"^rollout\.max_new_tokens = 24 exceeds the model's context of 24 tokens: "):
        run("check", "--config", config, "--set", "rollout.max_new_tokens=24")
    with pytest.raises(ConfigError, match=r"^data\.block_tokens = 99: exceeds the model's context of 24 tokens"):
        run("check", "--config", config, "--set", "data.block_tokens=99")
    (tmp_path / "file.py").write_text(
        "def never(responses): return []\ndef refuse(answer): raise ValueError\nnever.check_answer = refuse\n"
    )
    with pytest.raises(DataError, match=r"the answer '9' cannot be read by reward.function = 'file.py:never'"):
        run("check", "--config", config, "--set", "reward.function=file.py:never")


def test_pairs_of_a_configuration_are_checked_as_well(tmp_path: Path) -> None:
    records = [
        {"prompt": "1+1=", "chosen": "2", "rejected": "11"},
        {"prompt": "1" * 30, "chosen": "1", "rejected": "2"},
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    data = {"train": str(tmp_path / "pairs.jsonl")}
    config = write_config(tmp_path, data=data, algorithm={"name": "reward_model"})
    (report,) = json.loads(run("check", "--config", config, "--json")).values()
    assert (report["rows"], report["cut"], report["longest_response"]) == (2, 1, 3)
    assert report["first"] == {"prompt": "1+1=", "response": "2<eos>", "rejected": "11<eos>"}
    assert "rows are longer than the model's context of" in run("check", "--config", config)


def test_check_reads_pairs_of_a_file_as_a_reward_model_does(tmp_path: Path) -> None:
    build_character_tokenizer("0123456789+=", tmp_path / "tokenizer")
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"question": "1+1=", "chosen": "2", "rejected": "11"}\n')
    words = ("check", str(path), "--model", str(tmp_path / "tokenizer"))
    first = {"prompt": "1+1=", "response": "2<eos>", "rejected": "11<eos>"}
    assert json.loads(run(*words, "--json"))["pairs"]["first"] == first
    assert "tokens: prompts up to 4, responses up to 3" in run(*words)
    path.write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "2"}\n')
    with pytest.raises(DataError, match=r"pairs\.jsonl, line 1: its two sides are equal, '2'\. Remove the row"):
        run(*words[:2])


def test_prompts_that_are_all_dropped_are_refused(rows: str, tmp_path: Path) -> None:
    build_character_tokenizer("0123456789+=", tmp_path / "tokenizer")
    words = ("check", rows, "--model", str(tmp_path / "tokenizer"), "--max-prompt-tokens", "1", "--too-long", "drop")
    with pytest.raises(DataError, match=r"every prompt has more than 1 tokens, so --too-long 'drop' leaves no row"):
        run(*words)


def test_a_configuration_takes_no_other_option(rows: str, tmp_path: Path) -> None:
    config = write_config(tmp_path, data={"train": rows})
    for words, option in (((rows,), "FILE"), (("--model", "x"), "--model"), (("--max-new-tokens", "9"), "--max-new")):
        with pytest.raises(ConfigError, match=rf"^hybridflow data check --config: {option}.* has no part in it\. Set"):
            run("check", *words, "--config", config)
    with pytest.raises(ConfigError, match=r"--set is an option of --config\. Name a FILE, or a CONFIG with --config"):
        run("check", rows, "--set", "run.seed=1")
    with pytest.raises(ConfigError, match="no FILE is named"):
        run("check")


def test_what_a_run_refuses_the_report_refuses(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt": null}\n')
    with pytest.raises(DataError, match="line 2: field 'prompt' has no value"):
        run("check", str(tmp_path / "a.jsonl"))


def test_the_addition_set_is_that_of_the_quickstart(tmp_path: Path) -> None:
    files = run("addition", "--output", str(tmp_path)).split()
    assert [Path(each).name for each in files] == ["train.jsonl", "validation.jsonl", "test.jsonl"]
    assert len(load_rows(files[2])) == 500


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("gsm8k", "train.jsonl"),
        ("gsm8k-steps", "train.jsonl"),
        ("gsm8k-preferences", "solutions.jsonl"),
    ],
)
def test_without_a_source_the_file_is_named(tmp_path: Path, name: str, file: str) -> None:
    with pytest.raises(ConfigError, match=rf"^`hybridflow data {name}` needs --source DIR, a folder with {file}"):
        run(name, "--output", str(tmp_path / "new"))
    with pytest.raises(DataError, match=rf"has no file {file}\. The folder must hold {file} of the grade-school-math"):
        run(name, "--output", str(tmp_path / "new"), "--source", str(tmp_path))
    assert not (tmp_path / "new").exists()


def test_gsm8k_is_split_by_question(tmp_path: Path) -> None:
    records = [{"question": f"q{number}", "answer": f"#### {number}"} for number in range(30)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    files = run("gsm8k", "--output", str(tmp_path / "new"), "--source", str(tmp_path)).split()
    parts = [[(row.prompt, row.answer) for row in load_rows(each)] for each in files]
    assert [len(part) for part in parts] == [24, 3, 3]
    assert sorted(chain.from_iterable(parts)) == sorted((each["question"], each["answer"]) for each in records)


def test_steps_are_distinct_single_operations_on_small_integers(tmp_path: Path) -> None:
    kept = [(f"{number}+{number}=", str(2 * number)) for number in range(1, 20)] + [("48/2=", "24")]
    left_out = [
        "<<100-1=99>>",
        "<<1+2+3=6>>",
        "<<3/2=1.5>>",
        "<<2-3=-1>>",
        "<<0.5*4=2>>",
        "<<7=7>>",
        "<<50*2%=1>>",
        "9*9=81",
    ]
    texts = [f"so <<{prompt}{answer}>>{answer}, and {each}" for prompt, answer in kept for each in left_out]
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"question": f"q{n}", "answer": text}) + "\n" for n, text in enumerate(texts))
    )
    files = run("gsm8k-steps", "--output", str(tmp_path / "new"), "--source", str(tmp_path)).split()
    parts = [[(row.prompt, row.answer) for row in load_rows(each)] for each in files]
    assert [len(part) for part in parts] == [16, 2, 2]
    assert sorted(chain.from_iterable(parts)) == sorted(kept)


def test_preferences_pair_right_and_wrong_solutions(tmp_path: Path) -> None:
    def solve(*are_correct: bool) -> dict[str, Any]:
        return {f"m{n}": {"is_correct": each, "solution": f"{each} {n // 2}"} for n, each in enumerate(are_correct)}

    records = [{"question": f"q{number}", **solve(True, False, False, True, True)} for number in range(20)]
    records.append({"question": "all right", **solve(True, True)})
    (tmp_path / "solutions.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    files = run("gsm8k-preferences", "--output", str(tmp_path / "new"), "--source", str(tmp_path)).split()
    parts = [[json.loads(line) for line in Path(each).read_text().splitlines()] for each in files]
    questions = [{pair["prompt"] for pair in part} for part in parts]
    assert [len(each) for each in questions] == [16, 2, 2]
    assert len(set.union(*questions)) == 20, "all pairs of a question are in one file"
    assert sum(map(len, parts)) == 20 * 3 * 2
    pairs = {(each["chosen"], each["rejected"]) for part in parts for each in part}
    assert pairs == {(f"True {a}", f"False {b}") for a in (0, 1, 2) for b in (0, 1)}


@pytest.mark.skipif(not GSM8K.is_dir(), reason="needs a copy of GSM8K")
def test_the_real_gsm8k_makes_every_set(tmp_path: Path) -> None:
    for name, least in (("gsm8k", 100_000), ("gsm8k-preferences", 100_000), ("gsm8k-steps", 9_000)):
        files = run(name, "--output", str(tmp_path / name), "--source", str(GSM8K)).split()
        assert all(Path(each).stat().st_size > least for each in files)


@pytest.mark.skipif(not GSM8K.is_dir(), reason="needs a copy of GSM8K")
def test_the_steps_of_the_real_gsm8k_are_right(tmp_path: Path) -> None:
    operations = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
    files = run("gsm8k-steps", "--output", str(tmp_path), "--source", str(GSM8K)).split()
    for row in chain.from_iterable(map(load_rows, files)):
        left, sign, right = re.split(r"([-+*/])", row.prompt.removesuffix("="))
        assert operations[sign](int(left), int(right)) == int(row.answer)
