"""Mistakes of users: each ends in one clear message and an exit code, and what was written stays intact."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_algorithms.run_lock import RunLock
from hf_protocols import GenerationSpec, MachinePlan, MappingPlan, ModelPlan, ParallelSpec, PoolPlan
from small_runs import Outcome, read_metrics

SLOTS = {"models": 4, "reward": 1, "advantage": 1}

REWARDS = """
import math

def raises(prompts, responses, answers):
    return [1 / 0 for _ in prompts]

def not_a_number(prompts, responses, answers):
    return [math.inf] * len(prompts)

def exits(prompts, responses, answers):
    raise SystemExit(3)

def too_few(prompts, responses, answers):
    return []
"""


def write_rows(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def assert_one_message(outcome: Outcome, code: int, *parts: str) -> None:
    message = [line for line in outcome.errors.splitlines() if line.startswith("Error: ")]
    assert len(message) == 1, outcome.errors
    assert outcome.exit_code == code, outcome.errors
    assert "Traceback" not in outcome.errors.split("Error: ")[0], outcome.errors
    for part in parts:
        assert part in outcome.errors


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("data.train=absent.jsonl", ("absent.jsonl", "no such file")),
        ("run.itertions=3", ("run.itertions", "did you mean 'run.iterations'?")),
        ("run.iterations=many", ("run.iterations = 'many': must be a whole number",)),
        ("run.output_dir= runs", ("run.output_dir = ' runs': the path begins with a blank",)),
        ("run.output_dir=~no-such-user/x", ("run.output_dir = '~no-such-user/x': `~` cannot be expanded",)),
        ("rollout.options.cache_bytes=inf", ("rollout.options.cache_bytes = inf: is not a finite number",)),
        ("optimizer.weight_decay=1e400", ("optimizer.weight_decay = inf: is not a finite number",)),
        ("run.resume=1", ("run.resume", "[run] has output_dir, seed,")),
        (
            "reward.metric=math:sqrt",
            (
                "reward.metric = 'math:sqrt' cannot be called: ",
                "def f(prompts, responses, answers)",
            ),
        ),
        ("model.max_positions=8", ("tokens", "model.max_positions")),
        ("model.path=no/such/model", ("no/such/model",)),
        ("rollout.backend=no-such-engine", ("no-such-engine", "transformers")),
        ("reward.function=no_such_module:f", ("no_such_module",)),
        ("reward.function=hf_algorithms.rewards:exact_mach", ("exact_match",)),
        ("cluster.gpu=h10000", ("h10000", "h100")),
        ("model.num_heads=3", ("model.hidden_size=32", "model.num_heads=3")),
    ],
)
def test_a_bad_value_is_named(
    small_config: Path, hybridflow: Callable[..., Outcome], override: str, parts: tuple[str, ...]
) -> None:
    outcome = hybridflow("train", small_config, "--set", override)
    assert_one_message(outcome, 2, *parts)
    assert not (small_config.parent / "run").exists()


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize(
    ("option", "part"), [("cache_byte=9", "did you mean 'cache_bytes'?"), ("cache_bytes=9.5", "= 9.5: ")]
)
def test_a_wrong_rollout_option_is_named_before_anything_starts(
    small_config: Path, hybridflow: Callable[..., Outcome], command: str, option: str, part: str
) -> None:
    outcome = hybridflow(command, small_config, "--set", f"rollout.options.{option}")
    assert_one_message(outcome, 2, f"rollout.options.{option.partition('=')[0]}", part)


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("", ("line 2", "empty")),
        ('{"prompt": "1+1=", "answer"', ("line 2",)),
        ('{"answer": "2"}', ("line 2", "no field 'prompt'")),
        ('["1+1=", "2"]', ("line 2",)),
    ],
)
def test_a_bad_line_is_named_with_its_number(
    small_config: Path, hybridflow: Callable[..., Outcome], line: str, parts: tuple[str, ...]
) -> None:
    good = '{"prompt": "1+1=", "answer": "2"}'
    rows = write_rows(small_config.with_name("rows.jsonl"), [good, line, good])
    assert_one_message(hybridflow("train", small_config, "--set", f"data.train={rows}"), 2, "rows.jsonl", *parts)


PROMPT = b'{"prompt": "1+1=", "answer": "2"}\n'
CHAT = b'{"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}\n'


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.jsonl", gzip.compress(PROMPT), "is compressed with gzip. Unpack it, or name it by its content, such as a."),
        ("a.jsonl.gz", gzip.compress(PROMPT)[:-9], "the gzip file is cut short. Fetch it again"),
        (
            "a.jsonl",
            CHAT,
            "line 1: is a chat, and the tokenizer of model.tokenizer = 'characters' has no chat template",
        ),
        ("a.jsonl", CHAT.replace(b'"role": "user", ', b""), "message 1 of field 'messages' has no role. Add one"),
        ("a.jsonl", b'{"prompt": "1", "prompt": "2"}', "line 1: the key 'prompt' stands twice in one object"),
        ("a.jsonl", b'{"prompt": "1", "answer": 1e400}', "line 1: the number 1e400 is outside the range of a float"),
        ("a.jsonl", b'{"prompt": "1", "answer": NaN}', "line 1: field 'answer' is NaN, not a finite number"),
        (
            "a.jsonl",
            b'{"prompt": "1+1="}',
            "no row has an answer, with which reward.metric = 'hf_algorithms.rewards:exact_",
        ),
        (
            "a.jsonl",
            b'{"chosen": "1", "rejected": "2"}',
            "such pairs train a policy or a reward model. Use `hybridflow dpo` or `hybridflow reward-model`",
        ),
        ("a.jsonl", b'{"text": "1"}', "a text is learned, not answered"),
    ],
)
def test_data_that_a_run_cannot_use_is_one_line(
    small_config: Path, hybridflow: Callable[..., Outcome], name: str, content: bytes, part: str
) -> None:
    path = small_config.with_name(name)
    path.write_bytes(content)
    text = small_config.read_text()
    kept = [line for line in text.splitlines() if not line.startswith(("validation =", "test =", "train ="))]
    small_config.write_text("\n".join(kept).replace("[data]", f'[data]\ntrain = "{path}"'))
    outcome = hybridflow("train", small_config)
    assert_one_message(outcome, 2, "data.train", str(path), part)
    assert not (small_config.parent / "run").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", PROMPT * 3 + b"\n \n"),
        ("a.jsonl.gz", gzip.compress(PROMPT * 3)),
        ("a.jsonl", b'{"prompt": "1+1=", "answer": "2", "ignored": NaN}\n' * 3),
        ("a.jsonl", PROMPT * 2 + b'{"prompt": "1+1="}\n'),
    ],
)
def test_data_that_a_run_takes_all_the_same(
    small_config: Path, hybridflow: Callable[..., Outcome], name: str, content: bytes
) -> None:
    path = small_config.with_name(name)
    path.write_bytes(content)
    outcome = hybridflow("data", "check", "--config", small_config, "--set", f"data.train={path}", "--json")
    assert outcome.exit_code == 0, outcome.errors
    assert json.loads(outcome.output)["train"]["rows"] == 3


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("train", " a.toml"), "CONFIG = ' a.toml': the path begins with a blank"),
        (("plan", "."), "the configuration . cannot be read: Is a directory"),
        (("train", "CONFIG", "--plan", "."), "the plan . cannot be read: Is a directory"),
        (("train", "CONFIG", "--plan", "~/absent.json"), "absent.json cannot be read: No such file"),
        (("trace", ""), "RUN = '': a path cannot be empty or blank"),
        (("quickstart", "--output", "a\n"), "--output = 'a\\n': the path ends with a blank"),
    ],
)
def test_a_path_that_cannot_be_used_is_named(
    small_config: Path, hybridflow: Callable[..., Outcome], words: tuple[str, ...], part: str
) -> None:
    given = [str(small_config) if word == "CONFIG" else word for word in words]
    assert_one_message(hybridflow(*given), 2, part)
    assert not (small_config.parent / "run").exists()


@pytest.mark.parametrize("command", ["plan", "train"])
def test_an_answer_that_the_reward_cannot_read(
    small_config: Path, hybridflow: Callable[..., Outcome], command: str
) -> None:
    good, bad = '{"prompt": "1+1=", "answer": "2"}', '{"prompt": "1+1=", "answer": "two"}'
    rows = write_rows(small_config.with_name("rows.jsonl"), [good, good, bad])
    changes = (f"data.validation={rows}", "reward.function=hf_algorithms.rewards:gsm8k_reward")
    outcome = hybridflow(command, small_config, *(part for change in changes for part in ("--set", change)))
    assert_one_message(outcome, 2, "rows.jsonl, line 3: the answer 'two' cannot be read by reward.function")
    assert not (small_config.parent / "run" / "config.toml").exists()


def test_a_batch_that_the_ranks_cannot_share(small_config: Path, hybridflow: Callable[..., Outcome]) -> None:
    pools = [PoolPlan(name=name, machines=(MachinePlan(gpu_kind="cpu", slots=slots),)) for name, slots in SLOTS.items()]
    layout = ParallelSpec(dp_size=4)
    models = {role: ModelPlan(pool="models", backend="fsdp", train=layout) for role in ("critic", "reference")}
    models["actor"] = ModelPlan(pool="models", backend="fsdp", train=layout, generation=GenerationSpec())
    models |= {role: ModelPlan(pool=role, backend="function") for role in ("reward", "advantage")}
    plan = small_config.with_name("plan.json")
    plan.write_text(MappingPlan(pools=tuple(pools), models=models).to_json())
    sizes = ("run.executor=ray", "cluster.gpus_per_machine=4", "rollout.batch_size=2")
    outcome = hybridflow("train", small_config, "--plan", plan, *(word for size in sizes for word in ("--set", size)))
    assert_one_message(outcome, 2, "rollout.batch_size = 2: 4 generation replicas need at least 4 rows")


def test_a_model_directory_without_a_tokenizer(small_config: Path, hybridflow: Callable[..., Outcome]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = small_config.with_name("model")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=16, num_key_value_heads=1, **sizes)).save_pretrained(model)
    text = small_config.read_text().replace('tokenizer = "characters"', f'path = "{model}"')
    small_config.write_text(text)
    assert_one_message(hybridflow("train", small_config), 2, "holds no tokenizer", "model.tokenizer")


def test_an_output_directory_that_cannot_be_written(small_config: Path, hybridflow: Callable[..., Outcome]) -> None:
    outcome = hybridflow("train", small_config, "--set", f"run.output_dir={small_config}/run")
    assert_one_message(outcome, 2, "run.output_dir", "cannot be written")


def test_an_earlier_run_is_not_overwritten_unasked(small_config: Path, hybridflow: Callable[..., Outcome]) -> None:
    output = small_config.parent / "run"
    output.mkdir()
    (output / "precious.txt").write_text("mine")
    assert_one_message(hybridflow("train", small_config, "--overwrite"), 2, "is not empty")
    assert (output / "precious.txt").read_text() == "mine"


def test_a_directory_in_use_is_refused(small_config: Path, hybridflow: Callable[..., Outcome]) -> None:
    output = small_config.parent / "run"
    output.mkdir()
    lock = RunLock(output)
    before = sorted(output.iterdir())
    for words in (("train", small_config, "--overwrite"), ("quickstart", "--output", output)):
        assert_one_message(hybridflow(*words), 2, "writes there")
    assert sorted(output.iterdir()) == before
    lock.release()


def test_inputs_that_overwriting_would_remove_are_refused(
    small_config: Path, hybridflow: Callable[..., Outcome]
) -> None:
    assert hybridflow("train", small_config).exit_code == 0
    run = small_config.parent / "run"
    before = (run / "summary.json").read_text()
    words = ("--overwrite", "--set", f"model.path={run}/model", "--set", f"model.tokenizer={run}/model")
    assert_one_message(hybridflow("train", small_config, *words), 2, "model.path", "run.output_dir")
    outcome = hybridflow("train", small_config, "--overwrite", "--set", "data.train=absent.jsonl")
    assert_one_message(outcome, 2, "absent.jsonl")
    assert (run / "summary.json").read_text() == before
    assert hybridflow("train", small_config, "--overwrite").exit_code == 0


def test_impossible_options_leave_an_earlier_run_as_it_is(
    small_config: Path, hybridflow: Callable[..., Outcome]
) -> None:
    assert hybridflow("train", small_config).exit_code == 0
    before = {path: path.read_bytes() for path in small_config.parent.rglob("*") if path.is_file()}
    both = ("--set", "rollout.options.cache_bytes=9", "--set", "rollout.options.cache_fraction=0.5")
    server = ("--set", "rollout.backend=server", "--set", "rollout.options.urls=[]")
    for words, part in ((both, "both size the cache. Use one"), (server, "urls=[]. Use a list of 1 or more URLs")):
        for command in (("plan",), ("train", "--overwrite")):
            assert_one_message(hybridflow(*command, small_config, *words), 2, part)
    assert {path: path.read_bytes() for path in small_config.parent.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda plan: plan["models"].pop("critic"), "has the roles actor, critic"),
        (lambda plan: plan["models"]["critic"].update(train=None), "gives critic no layout"),
        (lambda plan: plan["models"]["actor"].update(train=None), "models.actor: a model's generation"),
        (lambda plan: plan["pools"][0]["machines"][0].update(slots="two"), "slots='two'"),
        (lambda plan: plan["models"]["actor"].update(micro_batch_tokens="x"), "micro_batch_tokens='x'"),
        (lambda plan: plan.update(schema_version=99), "schema_version 99"),
    ],
)
def test_a_plan_that_was_edited_wrongly(
    small_config: Path, hybridflow: Callable[..., Outcome], change: Callable[[Any], object], part: str
) -> None:
    plan = json.loads(hybridflow("plan", small_config, "--json").output)
    change(plan)
    file = small_config.with_name("plan.json")
    file.write_text(json.dumps(plan))
    assert_one_message(hybridflow("train", small_config, "--plan", file), 2, part)


def test_weights_that_are_damaged(small_config: Path, hybridflow: Callable[..., Outcome]) -> None:
    assert hybridflow("train", small_config).exit_code == 0
    model = small_config.parent / "run" / "model"
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    small_config.write_text(small_config.read_text().replace('tokenizer = "characters"', f'path = "{model}"'))
    outcome = hybridflow("train", small_config, "--set", f"run.output_dir={small_config.parent}/other")
    assert_one_message(outcome, 2, f"model.path = '{model}': model.safetensors cannot be read: it ends after 100 bytes")


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        ("raises", ("ZeroDivisionError", "my_rewards.py")),
        ("not_a_number", ("inf, which is not a finite number",)),
        ("too_few", ("0 scores for 1 responses",)),
        ("exits", ("SystemExit", "my_rewards.py")),
    ],
)
def test_a_reward_function_that_fails(
    small_config: Path, hybridflow: Callable[..., Outcome], function: str, parts: tuple[str, ...]
) -> None:
    small_config.with_name("my_rewards.py").write_text(REWARDS)
    outcome = hybridflow("train", small_config, "--set", f"reward.function=my_rewards:{function}")
    assert_one_message(outcome, 1, *parts)
    summary = json.loads((small_config.parent / "run" / "summary.json").read_text())
    assert (summary["status"], summary["iterations"]) == ("failed", 0)
    assert summary["error"]["type"] and summary["error"]["message"] in outcome.errors


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        (
            "optimizer.critic_learning_rate",
            ("optimizer step 2 was refused", "training.on_nonfinite", "(critic.update_critic on rank 0)"),
        ),
        ("optimizer.actor_learning_rate", ("are not finite", "(actor.compute_logprobs on rank 0)")),
    ],
)
def test_nonfinite_numbers_stop_the_run_and_keep_good_weights(
    small_config: Path, hybridflow: Callable[..., Outcome], key: str, parts: tuple[str, ...]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    outcome = hybridflow("train", small_config, "--set", f"{key}=1e30", "--set", "run.eval_every=5")
    assert_one_message(outcome, 1, *parts)
    run = small_config.parent / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["error"]["type"]) == ("failed", "NonFiniteLossError")
    assert summary["model_iteration"] == 0
    assert len(read_metrics(run)) == summary["iterations"] == 1
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    if (run / "replay").exists():
        assert f"hybridflow replay {run} --iteration 2 --role critic --rank 0 runs this call again" in outcome.errors
        again = hybridflow("replay", run, "--iteration", 2, "--role", "critic")
        assert again.output == ("critic.update_critic of rank 0 in iteration 2: 8 rows, with the weights that it had\n")
        assert_one_message(again, 1, summary["error"]["message"], "(critic.update_critic on rank 0)")
    else:
        assert "compute_logprobs" in parts[-1], "an update that fails is recorded"
