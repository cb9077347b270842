"""Reward and cost models end to end: trained from pairs, loaded by transformers, and part of a run's rewards."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_agreement import build_plan
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig

from hf_algorithms.config import format_toml, parse_config
from hf_algorithms.data import load_rows
from hf_algorithms.evaluation.metric_summary import compute_wilson_interval
from hf_algorithms.preflight.inputs import load_row_sets
from hf_algorithms.report import describe_metric
from hf_algorithms.run.loop import run_training
from hf_algorithms.run.supervised import check_supervised, run_supervised
from hf_algorithms.run_directory import RunDirectory
from hf_algorithms.trackers import MetricsHook
from hf_protocols import ConfigError, HybridFlowError, MappingPlan
from small_runs import Outcome, read_metrics, without_times

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 1, "max_positions": 16}
Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def pairs(addition_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs and safety labels: a sum is preferred to the same sum with a digit more, which is unsafe."""
    directory = tmp_path_factory.mktemp("pairs")
    for name, number in (("train", 64), ("test", 24)):
        rows = load_rows(addition_data / f"{name}.jsonl")[:number]
        texts = [(str(row.prompt), str(row.answer), f"{row.answer}7") for row in rows]
        better = [{"prompt": prompt, "chosen": good, "rejected": bad} for prompt, good, bad in texts]
        safer = [
            {"prompt": prompt, "response_0": bad, "response_1": good, "safer_response_id": 1,
             "is_response_0_safe": False, "is_response_1_safe": True}
            for prompt, good, bad in texts
        ]  # fmt: skip
        for file, records in ((name, better), (f"{name}_costs", safer)):
            (directory / f"{file}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return directory


def pair_body(pairs: Path, output: Path, *, ranks: int = 1, costs: bool = False) -> dict[str, Any]:
    suffix = "_costs" if costs else ""
    return {
        "run": {"output_dir": str(output), "iterations": 8 if costs else 4, "eval_every": 2,
                "executor": "ray" if ranks > 1 else "in_process"},
        "data": {"train": str(pairs / f"train{suffix}.jsonl"), "test": str(pairs / f"test{suffix}.jsonl")},
        "model": {"tokenizer": "characters", **SIZES},
        "algorithm": {"batch_size": 16, "labels": "cost" if costs else "reward"},
        "optimizer": {"critic_learning_rate": 1e-2},
        "training": {"shard": "root", "micro_batch_tokens": 200},
        "cluster": {"gpus_per_machine": ranks},
    }  # fmt: skip


@pytest.mark.parametrize("costs", [False, True])
def test_weighted_sources_share_every_batch_of_pairs(pairs: Path, tmp_path: Path, costs: bool) -> None:
    """Three to one: of 16 pairs 12 are of the first file, each once in an epoch of its own."""
    body = pair_body(pairs, tmp_path / "run", costs=costs)
    first, second = (str(pairs / f"{name}{'_costs' if costs else ''}.jsonl") for name in ("train", "test"))
    body["data"] = {"train": [{"path": first, "weight": 3}, {"path": second, "weight": 1}]}
    inputs, _ = check_supervised(parse_config(body, command="reward-model"), tmp_path / "model")
    assert (len(inputs.train), len(inputs.validation), len(inputs.test)) == (64 + 24, 64 + 24, 64 + 24)
    batches = [[row for _, row in inputs.order.draw(16, iteration=i, seed=0)] for i in range(6)]
    of_first = [[row for row in batch if row < 64] for batch in batches]
    assert [len(each) for each in of_first] == [12] * 6
    drawn = list(chain.from_iterable(of_first))
    assert sorted(drawn[:64]) == list(range(64)) and len(set(drawn[64:])) == 8
    others = [row for batch in batches for row in batch if row >= 64]
    assert sorted(others) == list(range(64, 88))


@pytest.mark.parametrize(
    ("sources", "says"),
    [
        ({"train": 3, "test": None}, ": some items have a weight and some do not. Set a weight for all or for none"),
        ({"train": 0}, "item 1 is not {path = ..., weight = ...}: weight = 0: must be above 0"),
        ({"train": 1, "empty": 1}, "data.train: {folder}/empty.jsonl has no rows"),
        ({"train": 1, "absent": 1}, "data.train: {folder}/absent.jsonl: no such file"),
    ],
)
@pytest.mark.parametrize("kind", ["pairs", "prompts"])
def test_wrong_sources_are_one_line_for_pairs_as_for_prompts(
    pairs: Path, tmp_path: Path, sources: dict[str, float | None], says: str, kind: str
) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_bytes((pairs / f"{name}.jsonl").read_bytes())
    (tmp_path / "empty.jsonl").touch()
    body = pair_body(pairs, tmp_path / "run")
    body["data"]["train"] = [
        {"path": f"{tmp_path}/{name}.jsonl", **({} if weight is None else {"weight": weight})}
        for name, weight in sources.items()
    ]

    def check() -> None:
        if kind == "pairs":
            check_supervised(parse_config(body, command="reward-model"), tmp_path / "model")
        else:
            load_row_sets(parse_config({"data": body["data"]}).data)

    with pytest.raises(HybridFlowError) as caught:
        check()
    assert says.replace("{folder}", str(tmp_path)) in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"), [("too_long", "drop"), ("answer_field", "a"), ("block_tokens", 4), ("max_prompt_tokens", 9)]
)
def test_keys_without_effect_on_pairs_are_refused(pairs: Path, tmp_path: Path, key: str, value: Any) -> None:
    body = pair_body(pairs, tmp_path / "run")
    body["data"][key] = value
    with pytest.raises(
        ConfigError, match=rf"^data\.{key} = .*: `hybridflow reward-model` does not read it\. Remove it$"
    ):
        check_supervised(parse_config(body, command="reward-model"), tmp_path / "model")
    config = parse_config(pair_body(pairs, tmp_path / "run"), command="reward-model")
    written = parse_config(tomllib.loads(format_toml(config)), command="reward-model")
    check_supervised(written, tmp_path / "model")


def train_pairs(body: Mapping[str, Any], on_metrics: MetricsHook | None = None) -> dict[str, Any]:
    config = parse_config(body, command="reward-model")
    return run_supervised(config, RunDirectory(Path(config.run.output_dir)), on_metrics=on_metrics)


@pytest.fixture(scope="module")
def reward_run(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("reward_run") / "run"
    heard: list[dict[str, float]] = []
    train_pairs(pair_body(pairs, output), lambda iteration, row: heard.append({"iteration": iteration, **row}))
    output.with_name("heard.json").write_text(json.dumps(heard))
    return output


def test_a_hook_hears_what_is_written(reward_run: Path) -> None:
    heard = json.loads(reward_run.with_name("heard.json").read_text())
    assert heard == read_metrics(reward_run) and len(heard) == 4


@pytest.fixture(scope="module")
def cost_run(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("cost_run") / "run"
    train_pairs(pair_body(pairs, output, costs=True))
    return output


def score_pairs(directory: Path, file: Path) -> list[tuple[float, float]]:
    """The scores of chosen and rejected by transformers alone."""
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    found = []
    for row in map(json.loads, file.read_text().splitlines()):
        ids = [tokenizer(row["prompt"] + row[side] + tokenizer.eos_token) for side in ("chosen", "rejected")]
        with torch.no_grad():
            first, second = (model(torch.tensor([each["input_ids"]])).logits.item() for each in ids)
        found.append((first, second))
    return found


def test_the_model_that_is_left_is_transformers_own(reward_run: Path, pairs: Path) -> None:
    """Accuracy of the held-out pairs, its interval and the last training metrics, from the files that a run leaves."""
    summary = json.loads((reward_run / "summary.json").read_text())
    scores = score_pairs(reward_run / "model", pairs / "test.jsonl")
    right = sum((first > second) + (first == second) / 2 for first, second in scores)
    assert (summary["metric"], summary["score_before"], summary["rows"]) == ("accuracy", 0.5, 24)
    assert summary["score_after"] == right / 24 > 0.9
    assert summary["interval_after"] == list(compute_wilson_interval(right, 24))
    metrics = read_metrics(reward_run)
    assert metrics[0]["ranking/loss"] == pytest.approx(0.6931, abs=1e-4)
    assert {name for row in metrics for name in row if not describe_metric(name)} == {"iteration"}
    assert metrics[3]["ranking/loss"] < metrics[0]["ranking/loss"]
    assert [("eval/validation/accuracy_low" in row) for row in metrics] == [False, True, False, True]
    assert "ranking/loss" in (reward_run / "report.html").read_text()


def test_a_run_reads_its_own_file_back(reward_run: Path) -> None:
    text = (reward_run / "config.toml").read_text()
    assert format_toml(parse_config(tomllib.loads(text), command="reward-model")) == text
    assert "[rollout]" not in text


def test_a_file_for_pairs_is_explained_and_planned(reward_run: Path, hybridflow: Run) -> None:
    explained = hybridflow("config", reward_run / "config.toml")
    assert (explained.exit_code, "[rollout]" in explained.output) == (0, False), explained.errors
    assert parse_config(tomllib.loads(explained.output), command="reward-model").algorithm.name == "reward_model"
    planned = hybridflow("plan", reward_run / "config.toml", "--json")
    assert planned.exit_code == 0, planned.errors
    assert json.loads(planned.output)["models"].keys() == {"reward_model"}


def test_two_ranks_learn_the_same_from_pairs(
    reward_run: Path, pairs: Path, tmp_path: Path, cluster_address: str
) -> None:
    body = pair_body(pairs, tmp_path / "run", ranks=2)
    body["cluster"]["address"] = cluster_address
    train_pairs(body)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["models"]["reward_model"]["train"]["dp_size"] == 2
    rows = zip(without_times(read_metrics(reward_run)), without_times(read_metrics(tmp_path / "run")), strict=True)
    for one, other in rows:
        assert other == pytest.approx(one, rel=1e-4, abs=1e-6)
    config = parse_config(
        pair_body(pairs, tmp_path / "few", ranks=2) | {"algorithm": {"batch_size": 1}}, command="reward-model"
    )
    given = MappingPlan.from_json((tmp_path / "run" / "plan.json").read_text())
    with pytest.raises(ConfigError, match=r"algorithm\.batch_size = 1: 2 data-parallel ranks of the reward_model need"):
        check_supervised(config, tmp_path / "model", plan=given)


def test_costs_have_the_sign_of_their_labels(cost_run: Path) -> None:
    last = read_metrics(cost_run)[-1]
    assert last["eval/validation/sign_accuracy"] > 0.7
    assert last["eval/validation/accuracy"] > 0.9


def rl_body(data: Path, output: Path, reward: Mapping[str, Any], **sections: Any) -> dict[str, Any]:
    return {
        "run": {"output_dir": str(output), "iterations": 2, "eval_every": 2, "executor": "in_process"},
        "data": {"train": str(data / "train.jsonl"), "max_eval_rows": 4},
        "model": {"tokenizer": "characters", **SIZES},
        "rollout": {"batch_size": 8, "max_new_tokens": 5},
        "reward": reward,
        "training": {"shard": "root"},
        "cluster": {"gpus_per_machine": 1},
        **sections,
    }


def train(body: Mapping[str, Any], *, on_all_ranks: bool = False) -> list[dict[str, Any]]:
    """Metrics of a run; `on_all_ranks` shards every model over all of them, in place of the mapper's plan."""
    config = parse_config(body)
    run_training(config, RunDirectory(Path(config.run.output_dir)), plan=build_plan(config) if on_all_ranks else None)
    return read_metrics(Path(config.run.output_dir))


@pytest.mark.slow
def test_ppo_on_ray_learns_from_a_reward_model(
    reward_run: Path, addition_data: Path, tmp_path: Path, cluster_address: str
) -> None:
    """Its critic starts from the reward model, as in the paper; the numbers are those of one rank in process."""
    model = str(reward_run / "model")
    reward = {"model": {"path": model, "weight": 2.0}}
    found = []
    for ranks, executor in ((1, "in_process"), (2, "ray")):
        body = rl_body(addition_data, tmp_path / executor, reward, roles={"critic": {"path": model}})
        body["run"] |= {"executor": executor, "iterations": 1}
        body["cluster"] = {"gpus_per_machine": ranks, "address": cluster_address}
        found.append(without_times(train(body, on_all_ranks=ranks > 1))[0])
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-5)
    assert found[0]["reward/mean"] == pytest.approx(2 * found[0]["reward/model/mean"], rel=1e-6)
    assert "eval/validation/model" in found[0]
    plan = json.loads((tmp_path / "ray" / "plan.json").read_text())
    assert plan["models"]["reward_model"]["train"]["dp_size"] == 2
    summary = json.loads((tmp_path / "ray" / "summary.json").read_text())
    assert summary["metric"] == "model"


def test_groups_are_filtered_by_a_reward_models_scores(reward_run: Path, addition_data: Path, tmp_path: Path) -> None:
    """The function pays the same for all, so that no group differs in its score; the model's has no weight."""
    reward = {"function": "small_runs:nothing", "model": {"path": str(reward_run / "model"), "weight": 0.0}}
    found = []
    for metric in ("scores", "reward/model"):
        algorithm = {"name": "dapo", "filter_metric": metric, "max_refills": 0}
        body = rl_body(addition_data, tmp_path / metric.replace("/", "_"), reward, algorithm=algorithm)
        body["run"]["iterations"], body["rollout"]["samples_per_prompt"] = 1, 2
        found += train(body)
    assert (found[0]["group/filtered"], found[0]["actor/skipped_steps"]) == (8.0, 1.0)
    assert found[1]["group/filtered"] < 8.0 and "actor/skipped_steps" not in found[1]
    assert found[1]["reward/model/mean"] == pytest.approx(found[0]["reward/model/mean"], rel=1e-5)


OWN_REWARD = '''
import torch
from tensordict import TensorDict
from hf_algorithms.recipes import RECIPES, Recipe
from hf_algorithms.workers import RewardWorker
from hf_protocols import RANK_ZERO, register
from dataclasses import replace


class Tokens(RewardWorker):
    """Pays for tokens; it does not take `is_counted`."""

    @register(protocol=RANK_ZERO, reads=("response_ids",), writes=("scores",))
    def compute_reward(self, batch):
        scores = torch.tensor([float(len(row)) for row in batch["response_ids"].unbind()])
        return TensorDict({"scores": scores}, batch_size=batch.batch_size)


def take(name):
    roles = [replace(role, worker=Tokens) if role.name == "reward" else role for role in RECIPES[name].roles]
    return replace(RECIPES[name], roles=tuple(roles))


REMAX, GRPO = take("remax"), take("grpo")
'''


@pytest.mark.parametrize("name", ["REMAX", "GRPO"])
def test_a_reward_worker_of_ones_own_runs(name: str, addition_data: Path, tmp_path: Path) -> None:
    file = tmp_path / f"own_worker_{name.lower()}.py"
    file.write_text(OWN_REWARD)
    algorithm = {"recipe": f"{file}:{name}"}
    body = rl_body(addition_data, tmp_path / name, {}, algorithm=algorithm)
    body["run"]["iterations"], body["rollout"]["samples_per_prompt"] = 1, 2
    (row,) = train(body)
    assert row["reward/mean"] == pytest.approx(row["response/tokens"])


def test_a_model_is_added_to_a_function(reward_run: Path, addition_data: Path, tmp_path: Path) -> None:
    """GRPO by the sum of both; evaluations stay with the function."""
    model = {"path": str(reward_run / "model"), "weight": 0.5}
    reward = {"function": "small_runs:response_length", "model": model}
    body = rl_body(addition_data, tmp_path / "run", reward, algorithm={"name": "grpo"})
    body["rollout"]["samples_per_prompt"] = 2
    row = train(body)[-1]
    length = 5 - row["reward/mean"] * 5 + 5 * 0.5 * row["reward/model/mean"]
    assert 0 <= length <= 5
    assert "eval/validation/exact_match" in row
    text = (tmp_path / "run" / "config.toml").read_text()
    assert format_toml(parse_config(tomllib.loads(text))) == text


def test_safe_rlhf_takes_a_cost_model(reward_run: Path, cost_run: Path, addition_data: Path, tmp_path: Path) -> None:
    """Both critics start from the models, as the authors' do; costs are the model's alone."""
    reward, cost = (str(run / "model") for run in (reward_run, cost_run))
    body = rl_body(
        addition_data,
        tmp_path / "run",
        {"model": {"path": reward}},
        cost={"model": {"path": cost}},
        algorithm={"name": "safe_rlhf", "cost_window": 8},
        roles={"critic": {"path": reward}, "cost_critic": {"path": cost}},
    )
    for row in train(body):
        assert row["constraint/cost"] == pytest.approx(row["cost/model/mean"], rel=1e-5)
        assert row["reward/mean"] == pytest.approx(row["reward/model/mean"], rel=1e-5)


def test_an_encoder_with_another_tokenizer_scores(addition_data: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(write_bpe(tmp_path / "bert"))
    config = BertConfig(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                        num_attention_heads=2, max_position_embeddings=64, num_labels=1)  # fmt: skip
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "bert")
    reward = {"model": {"path": str(tmp_path / "bert")}}
    rows = train(rl_body(addition_data, tmp_path / "run", reward, training={"shard": "layer"}))
    assert all("reward/model/mean" in row for row in rows)


def write_bpe(directory: Path) -> Path:
    from hf_algorithms.data import train_bpe_tokenizer

    train_bpe_tokenizer(["1+1=2"], vocab_size=258, directory=directory)
    return directory


def break_labels(model: Path) -> None:
    torch.manual_seed(0)
    config = AutoModelForSequenceClassification.from_pretrained(model).config
    config.num_labels = 2
    AutoModelForSequenceClassification.from_config(config).save_pretrained(model)


def remove_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def shorten_context(model: Path) -> None:
    body = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(body | {"max_position_embeddings": 8}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            break_labels,
            "has 2 labels in its config.json (LlamaForSequenceClassification). One number is needed. Give a ",
        ),
        (remove_weights, "holds no safetensors files"),
        (shorten_context, "exceed the context of 8 tokens of reward.model.path"),
    ],
)
def test_a_damaged_reward_model_is_one_line(
    damage: Callable[[Path], None], message: str, reward_run: Path, addition_data: Path, tmp_path: Path
) -> None:
    import shutil

    shutil.copytree(reward_run / "model", tmp_path / "model")
    damage(tmp_path / "model")
    config = parse_config(rl_body(addition_data, tmp_path / "run", {"model": {"path": str(tmp_path / "model")}}))
    with pytest.raises(HybridFlowError) as refused:
        run_training(config, RunDirectory(tmp_path / "run"))
    lines = str(refused.value).splitlines()
    assert all(message in line for line in lines), lines
    assert not (tmp_path / "run").exists()


def test_a_language_model_is_not_a_reward_model(reward_run: Path, addition_data: Path, tmp_path: Path) -> None:
    train(rl_body(addition_data, tmp_path / "first", {"model": {"path": str(reward_run / "model")}}))
    body = rl_body(addition_data, tmp_path / "run", {"model": {"path": str(tmp_path / "first" / "model")}})
    with pytest.raises(
        HybridFlowError, match=r"reward\.model\.path = .*is a language model without a head that scores"
    ):
        train(body)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("reward.metric=model",), "reward.metric = 'model': [reward.model] is absent"),
        (("cost.model.path=x",), "cost.model.path = 'x': recipe 'ppo' has no role 'cost' that takes a model's scores"),
        (
            ("reward.model.path=x", "roles.reward_model.path=y"),
            "roles.reward_model.path: the model of reward.model.path",
        ),
        (("reward.model.pth=x",), "reward.model"),
        (("roles.reward_model.dtype=float32",), "[roles.reward_model]: recipe 'ppo' has no role 'reward_model'"),
        (("algorithm.name=reward_model",), "hybridflow train does not run it. Use hybridflow reward-model"),
        (("reward.model.path=/nowhere",), "reward.model.path = '/nowhere'"),
    ],
)
def test_wrong_keys_are_one_line(
    keys: tuple[str, ...], message: str, small_config: Path, hybridflow: Run, tmp_path: Path
) -> None:
    ended = hybridflow("train", small_config, *(part for key in keys for part in ("--set", key)))
    assert (ended.exit_code, message in ended.errors) == (2, True), ended.errors
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"train": "{equal}"}}, "data.train: {equal}, line 2: its two sides are equal, '7'. Remove the row"),
        ({"training": {"micro_batch_tokens": 12}}, "above training.micro_batch_tokens = 12"),
        ({"rollout": {"batch_size": 8}}, "unknown key 'rollout.batch_size'"),
        ({"algorithm": {"name": "ppo"}}, "hybridflow reward-model does not run it. Use hybridflow train"),
        ({"algorithm": {"labels": "cost"}}, "line 1 lacks response_0, response_1, safer_response_id"),
        ({"training": {"backend": "megatron"}}, "training.backend = 'megatron'"),
    ],
)  # fmt: skip
def test_bad_pairs_are_one_line(
    changes: dict[str, Any], message: str, pairs: Path, tmp_path: Path, hybridflow: Run
) -> None:
    equal = tmp_path / "equal.jsonl"
    rows = (pairs / "train.jsonl").read_text().splitlines()
    equal.write_text(f'{rows[0]}\n{{"prompt": "1+6=", "chosen": "7", "rejected": "7"}}\n')
    body = pair_body(pairs, tmp_path / "run")
    for section, keys in changes.items():
        body.setdefault(section, {}).update(
            {key: value.format(equal=equal) if isinstance(value, str) else value for key, value in keys.items()}
        )
    lines = [f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
             for name, keys in body.items()]  # fmt: skip
    (tmp_path / "pairs.toml").write_text("\n".join(lines))
    ended = hybridflow("reward-model", tmp_path / "pairs.toml")
    assert (ended.exit_code, message.format(equal=equal) in ended.errors) == (2, True), ended.errors
    assert not (tmp_path / "run").exists()


def test_the_page_on_reward_models_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hybridflow: Run
) -> None:
    page = (ROOT / "docs" / "how-to" / "train-a-reward-model.md").read_text()
    for name, block in re.findall(r"`([\w.]+)`:\n\n```(?:json|toml)\n(.*?)```", page, re.DOTALL):
        (tmp_path / name).write_text(block)
    monkeypatch.chdir(tmp_path)
    commands = [
        line.split() for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) for line in block.splitlines()
    ]
    assert [command[1] for command in commands] == ["reward-model", "train"]
    outputs = []
    for command in commands:
        ended = hybridflow(*command[1:])
        assert ended.exit_code == 0, ended.errors
        outputs.append(ended.output)
    assert re.search(
        r"accuracy on held-out rows: 0\.500 -> [01]\.\d+ \(95 % interval [\d.]+ to [\d.]+, 4 rows\)", outputs[0]
    )
    assert "model on rows of data.train" in outputs[1]
