"""Exit code 2 means that nothing was made: a refused command leaves no file and no folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import hf_controller
from hf_algorithms.commands import quickstart
from hf_algorithms.preflight import machine
from hf_algorithms.run_directory import RunDirectory
from hf_protocols import PoolError
from small_runs import Outcome, read_samples

UNSIGNED = "def one(prompts, responses, answers):\n    return [1.0] * len(prompts)\n\nraise RuntimeError('broken')\n"


def rows_of(path: Path, prompts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "2"}) + "\n" for prompt in prompts))
    return path


def files_in(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


REFUSED = [
    "data.test=absent.jsonl",
    "reward.function=broken_rewards:one",
    "reward.metric=hf_algorithms.rewards:nothing",
    "rollout.backend=nonsense",
    "rollout.options.cache_byte=1",
    "rollout.max_new_tokens=400",
    "training.backend=nonsense",
    "training.micro_batch_tokens=9",
    "algorithm.mini_batches=16",
    "optimizer.betas=[0.9, 1.0]",
    "cluster.gpu=h10000",
    "model.path=no/such/model",
    "model.num_heads=3",
]


@pytest.fixture
def small_config(small_config: Path) -> Path:
    """With three rows for data: what is refused is refused at once."""
    rows = rows_of(small_config.with_name("three.jsonl"), ["1+1=", "10+1=", "37+85="])
    lines = small_config.read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("validation =", "test =", "train ="))]
    kept.insert(kept.index("[data]") + 1, f'train = "{rows}"')
    small_config.write_text("\n".join(kept))
    return small_config


@pytest.mark.parametrize("override", REFUSED)
def test_a_refused_run_makes_nothing(small_config: Path, hybridflow: Callable[..., Outcome], override: str) -> None:
    small_config.with_name("broken_rewards.py").write_text(UNSIGNED)
    before = files_in(small_config.parent)
    output = ("--set", f"run.output_dir={small_config.parent}/deep/run")
    messages = []
    for command in (("plan",), ("train", *output)):
        outcome = hybridflow(command[0], small_config, *command[1:], "--set", override)
        assert outcome.exit_code == 2, outcome.errors
        messages.append(next(line for line in outcome.errors.splitlines() if line.startswith("Error: ")))
        made = {path: body for path, body in files_in(small_config.parent).items() if "__pycache__" not in path.parts}
        assert made == before
    assert len(set(messages)) == 1, "plan and train find the same"


def test_a_refused_plan_file_makes_nothing(small_config: Path, hybridflow: Callable[..., Outcome]) -> None:
    file = small_config.with_name("plan.json")
    for content in (b"{", b"", b"\xff\xfe", b'{"schema_version": 1, "pools": [], "models": {}}'):
        file.write_bytes(content)
        assert hybridflow("train", small_config, "--plan", file).exit_code == 2
        assert not (small_config.parent / "run").exists()
    assert hybridflow("train", small_config, "--plan", small_config.parent).exit_code == 2


def test_a_device_that_is_not_there_is_refused(small_config: Path, hybridflow: Callable[..., Outcome]) -> None:
    """A plan for it may be made here; it is followed where the device is."""
    words = ("--set", "cluster.gpu=h100")
    assert hybridflow("plan", small_config, *words).exit_code == 0
    outcome = hybridflow("train", small_config, *words)
    assert outcome.exit_code == 2
    assert "cluster.gpu = 'h100' needs a CUDA device, and none was found" in outcome.errors
    assert not (small_config.parent / "run").exists()


def test_a_cluster_that_does_not_start_leaves_nothing(
    small_config: Path, hybridflow: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**options: object) -> None:
        raise PoolError("no cluster here")

    monkeypatch.setattr(hf_controller, "RayExecutor", refuse)
    outcome = hybridflow("train", small_config, "--set", "run.executor=ray")
    assert (outcome.exit_code, "Error: no cluster here" in outcome.errors) == (2, True)
    assert not (small_config.parent / "run").exists()


def test_what_fails_later_is_a_failed_run(small_config: Path, hybridflow: Callable[..., Outcome]) -> None:
    """Holds for every class of error, once the directory was touched."""
    small_config.with_name("late.py").write_text(
        "from hf_protocols import ConfigError\n\ndef f(prompts, responses, answers):\n    raise ConfigError('late')\n"
    )
    outcome = hybridflow("train", small_config, "--set", "reward.function=late:f")
    assert outcome.exit_code == 1
    assert (small_config.parent / "run" / "config.toml").is_file()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--rollout", "nonsense"), "no rollout backend is named 'nonsense'"),
        (("--ranks", "32"), "33 processes of about 0.5 GiB need 16.5 GiB, and this machine has 4.0 GiB"),
    ],
)
def test_a_refused_quickstart_leaves_an_earlier_one(
    tmp_path: Path,
    hybridflow: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    part: str,
) -> None:
    monkeypatch.setattr(machine, "read_machine_limits", lambda: type("Limits", (), {"memory_bytes": 4 << 30}))
    output = tmp_path / "deep" / "quick"
    outcome = hybridflow("quickstart", "--output", output, *words)
    assert outcome.exit_code == 2, outcome.errors
    assert part in outcome.errors
    assert list(tmp_path.iterdir()) == []
    quickstart.prepare_quickstart(RunDirectory(output), seed=1)
    before = files_in(tmp_path)
    assert hybridflow("quickstart", "--output", output, *words).exit_code == 2
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("name", ["train", "validation", "test"])
def test_a_long_row_is_named_before_anything_starts(
    small_config: Path, hybridflow: Callable[..., Outcome], name: str
) -> None:
    file = rows_of(small_config.with_name("rows.jsonl"), ["1+1=", "1+1=", "1" * 14])
    words = ("--set", f"data.{name}={file}")
    for command in ("plan", "train"):
        outcome = hybridflow(command, small_config, *words)
        assert outcome.exit_code == 2, outcome.errors
        assert f"Error: data.{name} = '{file}', line 3: its prompt of 14 tokens" in outcome.errors


def test_a_test_row_above_the_budget_is_named_at_once(small_config: Path, hybridflow: Callable[..., Outcome]) -> None:
    file = rows_of(small_config.with_name("rows.jsonl"), ["1+1=", "10+10=10"])
    words = ("--set", f"data.test={file}", "--set", "training.micro_batch_tokens=12")
    for command in ("plan", "train"):
        outcome = hybridflow(command, small_config, *words)
        assert outcome.exit_code == 2, outcome.errors
        assert (
            f"Error: data.test = '{file}', line 2: its prompt of 8 tokens and a response of up to 5" in outcome.errors
        )
        assert "are 13 tokens, above training.micro_batch_tokens = 12" in outcome.errors
    assert hybridflow("train", small_config, *words[:3], "training.micro_batch_tokens=13").exit_code == 0


def test_in_process_there_is_one_rank_on_any_cluster(small_config: Path, hybridflow: Callable[..., Outcome]) -> None:
    words = ("--set", "cluster.gpus_per_machine=4", "--set", "rollout.batch_size=256", "--set", "model.hidden_size=64")
    outcome = hybridflow("train", small_config, *words, "--set", "run.iterations=1")
    assert outcome.exit_code == 0, outcome.errors
    plan = json.loads((small_config.parent / "run" / "plan.json").read_text())
    assert {pool["name"]: pool["machines"][0]["slots"] for pool in plan["pools"]} == {
        "actor+critic+reference": 1, "reward+advantage": 1,
    }  # fmt: skip


def test_one_evaluation_row_is_enough_in_process(small_config: Path, hybridflow: Callable[..., Outcome]) -> None:
    file = rows_of(small_config.with_name("rows.jsonl"), ["1+1="])
    outcome = hybridflow("train", small_config, "--set", f"data.validation={file}", "--set", f"data.test={file}")
    assert outcome.exit_code == 0, outcome.errors
    for iteration in (0, 2):
        assert [each["prompt"] for each in read_samples(small_config.parent / "run", iteration)] == ["1+1="]
