"""docs/how-to/train-on-gsm8k.md: its table is that of the committed runs, and its commands go the whole way."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from bench_gsm8k import DATA, EXAMPLES, STAGES
from gsm8k_page import MARK_POINTS, PAGE, build_table
from measurement import RESULTS

from small_runs import Outcome, read_metrics

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT.parent / "shared" / "data" / "gsm8k"
COMMANDS = "".join(re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)).splitlines()
SHORT: Mapping[str, Mapping[str, object]] = {
    "steps_sft": {"run.iterations": 300, "run.eval_every": 300},
    "steps_grpo": {"run.iterations": 80, "run.eval_every": 80},
    "problems_sft": {"run.iterations": 20, "run.eval_every": 20, "data.max_eval_rows": 16},
    "reward": {"run.iterations": 6, "run.eval_every": 6},
    "ppo": {"run.iterations": 2, "run.eval_every": 2, "data.max_eval_rows": 8, "rollout.max_new_tokens": 24},
}
"""Of the whole path minutes are left on two cores."""


def test_the_page_has_the_table_of_the_committed_runs() -> None:
    result = json.loads((RESULTS / "gsm8k.json").read_text())
    metrics = {name: metric["value"] for name, metric in result["metrics"].items()}
    assert f"<!-- gsm8k -->\n\n{build_table(metrics)}\n\n" in PAGE.read_text()
    gains = [
        value - metrics[name.replace("after", "before")]
        for name, value in metrics.items()
        if name.startswith("steps_grpo_after")
    ]
    assert gains and min(gains) >= MARK_POINTS
    assert all(value > 10 for name, value in metrics.items() if name.startswith("steps_grpo_before"))


def test_the_page_runs_what_the_benchmark_runs() -> None:
    made = [f"hybridflow data {name} --source path/to/gsm8k --output data/{folder}" for folder, name in DATA.items()]
    run = [f"hybridflow {stage.command} examples/gsm8k/{stage.name}.toml" for stage in STAGES.values()]
    evaluated = [command for command in COMMANDS if " evaluate " in command]
    assert [*made, *run[:2], *evaluated, *run[2:]] == COMMANDS
    assert sorted(path.stem for path in EXAMPLES.glob("*.toml")) == sorted(STAGES)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not SOURCE.is_dir(), reason="GSM8K does not lie in ../shared/data/gsm8k")
def test_the_commands_go_the_whole_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hybridflow: Callable[..., Outcome]
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS:
        words = command.replace("path/to/gsm8k", str(SOURCE)).split()[1:]
        changes = SHORT.get(Path(words[1]).stem, {})
        outcome = hybridflow(*words, *(word for key, value in changes.items() for word in ("--set", f"{key}={value}")))
        assert outcome.exit_code == 0, outcome.errors
    summaries = {name: json.loads((tmp_path / "runs" / name / "summary.json").read_text()) for name in STAGES}
    for name in ("steps_sft", "problems_sft"):
        assert summaries[name]["lower_is_better"] and summaries[name]["score_after"] < summaries[name]["score_before"]
    low, high = summaries["reward"]["interval_after"]
    assert 0 < low < summaries["reward"]["score_after"] < high < 1
    assert {"score_before", "score_after", "kl_to_reference"} <= summaries["ppo"].keys()
    assert all(0 <= row["reward/solved/mean"] <= 1 for row in read_metrics(tmp_path / "runs" / "ppo"))
    assert 0.05 < summaries["steps_grpo"]["score_before"] < 0.5
    rewards = [row["reward/mean"] for row in read_metrics(tmp_path / "runs" / "steps_grpo")]
    assert sum(rewards[-20:]) / 20 > sum(rewards[:20]) / 20 + 0.02  # of 5,120 samples each
