"""`hybridflow sft` and `dpo` end to end, against the same training by transformers and torch alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_agreement import build_plan
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_algorithms import evaluate
from hf_algorithms.config import parse_config
from hf_algorithms.evaluation.metric_summary import compute_wilson_interval
from hf_algorithms.run.any_run import run_recipe
from hf_algorithms.run.supervised import check_supervised
from hf_algorithms.run_directory import RunDirectory
from hf_protocols import ConfigError
from small_runs import Outcome, read_metrics, read_samples, without_times

ROOT = Path(__file__).resolve().parents[2]
LEARNING_RATE = 1e-3
Run = Callable[..., Outcome]
Rows = list[dict[str, str]]


def write(path: Path, rows: Rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def build_rows(command: str, numbers: range) -> Rows:
    sums = [(f"{a}+{a * a % 7}=", str(a + a * a % 7)) for a in numbers]
    if command == "sft":
        return [{"prompt": prompt, "answer": answer} for prompt, answer in sums]
    return [{"prompt": prompt, "chosen": answer, "rejected": answer + "7" * (1 + n % 3)}
            for n, (prompt, answer) in enumerate(sums)]  # fmt: skip


def build_body(command: str, folder: Path, *, ranks: int = 1, **algorithm: Any) -> dict[str, Any]:
    """Every batch holds all rows, so that their order has no part in it."""
    folder.mkdir(exist_ok=True)
    return {
        "run": {"output_dir": str(folder / "run"), "iterations": 2, "eval_every": 2,
                "executor": "ray" if ranks > 1 else "in_process"},
        "data": {"train": write(folder / "train.jsonl", build_rows(command, range(9))),
                 "test": write(folder / "test.jsonl", build_rows(command, range(9, 14)))},
        "model": {"tokenizer": "characters", "hidden_size": 32, "intermediate_size": 64, "num_layers": 1,
                  "num_heads": 1, "max_positions": 16},
        "algorithm": {"batch_size": 9, **algorithm},
        "optimizer": {"actor_learning_rate": LEARNING_RATE, "max_grad_norm": 1e3},
        "training": {"shard": "root"},
        "cluster": {"gpus_per_machine": ranks},
    }  # fmt: skip


def run(command: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]], Path]:
    config = parse_config(body, command=command)
    output = Path(config.run.output_dir)
    plan = build_plan(config) if config.run.executor == "ray" else None
    return run_recipe(config, RunDirectory(output), plan=plan), read_metrics(output), output


class TransformersRun:
    """The same model and rows by transformers' own loss and torch's AdamW."""

    def __init__(self, output: Path, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(output / "initial_model")
        self.model, self.reference = (
            AutoModelForCausalLM.from_pretrained(output / "initial_model").float() for _ in range(2)
        )
        self.rows, self.held_out = (
            [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
            for name in ("train", "test")
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
        )

    def encode(self, rows: Rows, key: str) -> dict[str, torch.Tensor]:
        """Padded ids, and labels that are -100 on prompts and padding."""
        pairs = [(self.tokenizer(row["prompt"])["input_ids"],
                  [*self.tokenizer(row[key], add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id])
                 for row in rows]  # fmt: skip
        width = max(len(prompt) + len(answer) for prompt, answer in pairs)
        found = [
            (prompt + answer + [0] * (width - len(prompt) - len(answer)),
             [-100] * len(prompt) + answer + [-100] * (width - len(prompt) - len(answer)),
             [1] * (len(prompt) + len(answer)) + [0] * (width - len(prompt) - len(answer)))
            for prompt, answer in pairs
        ]  # fmt: skip
        names = ("input_ids", "labels", "attention_mask")
        return {name: torch.tensor([row[place] for row in found]) for place, name in enumerate(names)}

    def label_loss(self, rows: Rows) -> torch.Tensor:
        loss: torch.Tensor = self.model(**self.encode(rows, "answer")).loss
        return loss

    def evaluate(self) -> float:
        return float(self.label_loss(self.held_out).detach())

    def log_ratios(self, rows: Rows, side: str) -> torch.Tensor:
        columns = self.encode(rows, side)
        labels = columns.pop("labels")[:, 1:]
        sums = []
        for model in (self.model, self.reference):
            logprobs = model(**columns).logits[:, :-1].log_softmax(-1)
            chosen = logprobs.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
            sums.append((chosen * (labels >= 0)).sum(1))
        return sums[0] - sums[1].detach()

    def margins(self, rows: Rows) -> torch.Tensor:
        return self.log_ratios(rows, "chosen") - self.log_ratios(rows, "rejected")

    def step(self, loss: torch.Tensor) -> float:
        """One update; returns the norm of the gradient."""
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = math.sqrt(sum(float(each.grad.square().sum()) for each in self.model.parameters()))
        self.optimizer.step()
        return norm


@pytest.fixture(scope="module")
def sft_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]], Path, Path]:
    folder = tmp_path_factory.mktemp("sft")
    return *run("sft", build_body("sft", folder)), folder


def test_sft_is_the_training_of_transformers(sft_run: Any) -> None:
    """Losses, gradients and the result of two updates are those of the loss that transformers computes from labels."""
    summary, metrics, output, folder = sft_run
    own = TransformersRun(output, folder)
    assert summary["score_before"] == pytest.approx(own.evaluate(), rel=1e-5)
    for row in metrics:
        loss = own.label_loss(own.rows)
        assert row["supervised/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
        assert row["actor/grad_norm"] == pytest.approx(own.step(loss), rel=1e-4)
    assert (summary["metric"], summary["lower_is_better"]) == ("loss", True)
    assert summary["score_after"] == pytest.approx(own.evaluate(), rel=1e-4)
    assert metrics[1]["supervised/loss"] < metrics[0]["supervised/loss"]
    assert metrics[1]["eval/validation/perplexity"] == pytest.approx(math.exp(metrics[1]["eval/validation/loss"]))
    assert "lower is better" in (output / "report.html").read_text()
    left = AutoModelForCausalLM.from_pretrained(output / "model")
    own.model.load_state_dict(left.state_dict())
    assert own.evaluate() == pytest.approx(summary["score_after"], rel=1e-6)


@pytest.mark.parametrize("kind", ["dpo", "ipo"])
def test_dpo_is_its_formula(kind: str, tmp_path: Path) -> None:
    """Losses in numpy from log-probs of transformers; gradients by autograd of the same formula."""
    beta = 0.3
    summary, metrics, output = run("dpo", build_body("dpo", tmp_path, beta=beta, preference_loss=kind))
    own = TransformersRun(output, tmp_path)
    assert (summary["metric"], summary["score_before"]) == ("accuracy", 0.5)
    for row in metrics:
        margins = own.margins(own.rows)
        h = margins.detach().double().numpy()
        losses = np.log1p(np.exp(-beta * h)) if kind == "dpo" else (h - 1 / (2 * beta)) ** 2
        assert row["preference/loss"] == pytest.approx(float(losses.mean()), rel=1e-4)
        pairs = -torch.nn.functional.logsigmoid(beta * margins) if kind == "dpo" else (margins - 1 / (2 * beta)) ** 2
        assert row["actor/grad_norm"] == pytest.approx(own.step(pairs.mean()), rel=1e-3)
    h = own.margins(own.held_out).detach().numpy()
    assert metrics[1]["eval/validation/margin"] == pytest.approx(
        beta * float(own.margins(own.rows).detach().mean()), rel=1e-3
    )
    right = int((h > 0).sum())
    assert (summary["score_after"], summary["rows"]) == (right / 5, 5)
    assert summary["interval_after"] == list(compute_wilson_interval(right, 5))
    assert metrics[1]["preference/accuracy"] > 0.5


@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_ranks_and_micro_batches_have_no_part_in_it(
    command: str, tmp_path: Path, cluster_address: str, sft_run: Any
) -> None:
    """Two ranks with a forward pass for each row learn what one rank learns from all rows at once."""
    one = sft_run[1] if command == "sft" else run("dpo", build_body("dpo", tmp_path / "one"))[1]
    body = build_body(command, tmp_path / "two", ranks=2)
    body["cluster"]["address"] = cluster_address
    body["training"]["micro_batch_tokens"] = 12
    _, two, _ = run(command, body)
    names = ("supervised/loss", "preference/loss", "actor/grad_norm", "eval/validation/loss", "eval/validation/margin")
    for first, second in zip(without_times(one), without_times(two), strict=True):
        for name in first.keys() & set(names):
            assert second[name] == pytest.approx(first[name], rel=1e-3, abs=1e-5)


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}|{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


def test_chats_and_texts_are_learned(tmp_path: Path) -> None:
    """Whole chats of two answers in one file; texts in another, split into blocks."""
    chat = [{"role": role, "content": text} for role, text in
            (("user", "1+1"), ("assistant", "2"), ("user", "2+2"), ("assistant", "4"))]  # fmt: skip
    found = {}
    for name, row in (("chats", {"messages": chat}), ("texts", {"text": "1+1=2|2+2=4"})):
        body = build_body("sft", tmp_path / name)
        path = tmp_path / f"{name}.jsonl"
        path.write_text((json.dumps(row) + "\n") * 6)
        body["data"] = {"train": str(path)} | ({"chat_template": CHAT_TEMPLATE} if name == "chats" else {})
        body["model"]["max_positions"] = 24
        body["optimizer"]["actor_learning_rate"] = 1e-2
        body["algorithm"]["batch_size"] = 4
        summary, _, _ = run("sft", body)
        inputs, _ = check_supervised(parse_config(body, command="sft"), tmp_path / f"{name}_model")
        found[name] = inputs.train.batch([0])["response_mask"].unbind()[0].tolist()
        assert summary["score_after"] < summary["score_before"]
    trained = [n for n, is_trained in enumerate(found["chats"]) if is_trained]
    assert (trained, len(found["chats"])) == ([0, 8, 9], len("2|u2+2|a4") + 1), "2, and 4 with the end of sequence"
    assert all(found["texts"])


@pytest.mark.parametrize(
    ("command", "changes", "message"),
    [
        ("sft", {"data": {"train": "{unanswered}"}}, "line 2: has no answer, so nothing can be learned from it"),
        ("sft", {"data": {"train": "{pairs}"}}, "data.train: {pairs} has two responses to a prompt"),
        ("sft", {"rollout": {"batch_size": 8}}, "unknown key 'rollout.batch_size'"),
        ("sft", {"algorithm": {"name": "dpo"}}, "hybridflow sft does not run it. Use hybridflow dpo"),
        ("sft", {"model": {"max_positions": 4}}, "tokens, more than the model's context of 4"),
        ("sft", {"training": {"micro_batch_tokens": 4}}, "above training.micro_batch_tokens = 4"),
        ("sft", {"data": {"block_tokens": 8}}, "data.block_tokens = 8: data."),
        ("dpo", {"data": {"train": "{equal}"}}, "data.train: {equal}, line 2: its two sides are equal, '7'"),
        ("dpo", {"data": {"too_long": "drop"}}, "data.too_long = 'drop': `hybridflow dpo` does not read it. Remove it"),
        ("sft", {"data": {"max_prompt_tokens": 4}}, "data.max_prompt_tokens = 4: `hybridflow sft` does not read it."),
        ("sft", {"data": {"pretraining": "x"}}, "data.pretraining = 'x': `hybridflow sft` does not read it. Remove it"),
        ("dpo", {"reward": {"function": "x:y"}}, "unknown key 'reward.function'"),
        ("dpo", {"algorithm": {"beta": 0.0}}, "algorithm.beta = 0.0"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    command: str, changes: dict[str, Any], message: str, tmp_path: Path, hybridflow: Run
) -> None:
    files = {
        "unanswered": write(tmp_path / "unanswered.jsonl", [{"prompt": "1", "answer": "1"}, {"prompt": "2"}]),
        "pairs": write(tmp_path / "pairs.jsonl", build_rows("dpo", range(3))),
        "equal": write(
            tmp_path / "equal.jsonl", [*build_rows("dpo", range(1)), {"prompt": "1", "chosen": "7", "rejected": "7"}]
        ),
    }
    body = build_body(command, tmp_path / "files")
    for section, keys in changes.items():
        body.setdefault(section, {}).update(
            {key: value.format(**files) if isinstance(value, str) else value for key, value in keys.items()}
        )
    lines = [f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
             for name, keys in body.items()]  # fmt: skip
    (tmp_path / "run.toml").write_text("\n".join(lines))
    ended = hybridflow(command, tmp_path / "run.toml")
    shown = [line for line in ended.errors.splitlines() if line.strip()]
    assert (ended.exit_code, message.format(**files) in ended.errors) == (2, True), ended.errors
    assert len(shown) <= 2 and not (tmp_path / "files" / "run").exists(), "a line for each data set at most"


@pytest.mark.parametrize(("name", "rate"), [("sft", 1e-5), ("dpo", 1e-6)])
def test_a_starting_file_is_planned_and_its_data_checked(
    name: str, rate: float, tmp_path: Path, hybridflow: Run
) -> None:
    data = write(tmp_path / "rows.jsonl", build_rows(name, range(64)))
    printed = hybridflow("config", "--algorithm", name, "--data", data, "--set", "model.tokenizer=characters")
    assert (printed.exit_code, "[rollout]" in printed.output.splitlines()) == (0, False), printed.errors
    file = tmp_path / "start.toml"
    file.write_text(printed.output)
    planned = hybridflow("plan", file, "--json")
    roles = {"sft": {"actor"}, "dpo": {"actor", "reference", "advantage"}}[name]
    assert (planned.exit_code, json.loads(planned.output)["models"].keys()) == (0, roles), planned.errors
    checked = hybridflow("data", "check", "--config", file)
    assert (checked.exit_code, "0+0=" in checked.output) == (0, True), checked.errors
    assert f"actor_learning_rate = {rate}" in printed.output


def test_longest_prompt_and_answer_may_come_from_two_rows(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2" * 9}, {"prompt": "1" * 9, "answer": "2"}]
    body = build_body("sft", tmp_path) | {
        "data": {"train": write(tmp_path / "rows.jsonl", rows * 2)},
        "algorithm": {"name": "sft", "batch_size": 2},
    }
    found, _ = check_supervised(parse_config(body, command="sft"), tmp_path / "model")
    assert found.train.max_prompt_tokens + found.train.max_response_tokens > 16 >= found.train.longest[0]
    assert sum(found.count_tokens(["train"])) == 16


@pytest.mark.parametrize(
    ("page", "line"),
    [
        ("fine-tune-on-answers", r"loss \(lower is better\) on held-out rows: [\d.]+ -> [\d.]+ "),
        ("train-on-preferences", r"accuracy on held-out rows: 0\.500 -> [\d.]+ \(95 % interval [\d.]+ to [\d.]+, 4 r"),
    ],
)
def test_a_page_runs_as_written(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hybridflow: Run
) -> None:
    text = (ROOT / "docs" / "how-to" / f"{page}.md").read_text()
    for name, block in re.findall(r"`([\w.]+)`:\n\n```(?:json|toml)\n(.*?)```", text, re.DOTALL):
        (tmp_path / name).write_text(block)
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"```sh\n(.*?)\n```", text, re.DOTALL)
    ended = hybridflow(*command.split()[1:])
    assert ended.exit_code == 0, ended.errors
    assert re.search(line, ended.output), ended.output
    mapping = r"data\.train: \w+\.jsonl is JSONL of \d+ rows: \w+; prompt = 'prompt'"
    assert re.search(mapping, ended.output + ended.errors), ended.errors


@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_sets_are_generated_from_while_rows_are_learned(command: str, tmp_path: Path) -> None:
    body = build_body(command, tmp_path)
    answers = write(tmp_path / "answers.jsonl", build_rows("sft", range(9, 13)))
    sampled = {"name": "sampled", "data": answers, "metrics": ["exact_match", "small_runs:response_length"], "every": 1,
               "samples": 2, "temperature": 1.0, "max_new_tokens": 2, "rows": 3}  # fmt: skip
    body["rollout"] = {"max_new_tokens": 3}
    body["evaluation"] = [sampled, {"name": "last", "data": answers, "metrics": ["small_runs:response_length"]}]
    summary, (first, second), output = run(command, body)
    names = {f"eval/sampled/{metric}" for metric in ("exact_match", "response_length")}
    assert names <= first.keys() and names <= second.keys() and "eval/last/response_length" not in first
    assert len(read_samples(output, 1, "sampled")) == 6 and len(read_samples(output, 2, "last")) == 4
    found = evaluate(output / "model", data=answers, metrics=["small_runs:response_length"], max_new_tokens=3)
    assert found.metrics[0]["eval/answers/response_length"] == second["eval/last/response_length"]
    alone = build_body(command, tmp_path / "alone")
    plain, rows, _ = run(command, alone)
    assert plain["score_after"] == pytest.approx(summary["score_after"], rel=1e-5), "generation changes no weight"
    assert rows[1]["actor/grad_norm"] == pytest.approx(second["actor/grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    ("command", "sections", "message"),
    [
        ("reward-model", {"evaluation": [{"name": "a", "data": "b"}]}, "[[evaluation]]: the model of reward_model gen"),
        ("sft", {"rollout": {"backend": "vllm"}}, "rollout.backend: sft generates for [[evaluation]] alone, which is"),
        ("dpo", {"rollout": {"top_k": 3}}, "unknown key 'rollout.top_k'"),
        ("sft", {"evaluation": [{"name": "a", "data": "b", "metric": "c"}]}, "unknown key 'evaluation[0].metric'"),
    ],
)
def test_sets_that_cannot_be_generated_from_are_refused(
    command: str, sections: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_config(build_body(command, tmp_path) | sections, command=command)
