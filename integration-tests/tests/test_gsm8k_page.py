"""docs/how-to/train-on-gsm8k.md: its table is that of the committed runs, and its commands go the whole way."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from bench_gsm8k import DATA, EXAMPLES, STAGES
from gsm8k_page import PAGE, build_table
from measurement import RESULTS

from small_runs import Outcome, read_metrics

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT.parent / "shared" / "data" / "gsm8k"
COMMANDS = "".join(re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)).splitlines()
SHORT: Mapping[str, Mapping[str, object]] = {
    "steps_sft": {"run.iterations": 400, "run.eval_every": 400},
    "steps_grpo": {"run.iterations": 100, "run.eval_every": 100, "rollout.samples_per_prompt": 8},
    "problems_sft": {"run.iterations": 10, "run.eval_every": 10, "data.max_eval_rows": 8},
    "reward": {"run.iterations": 4, "run.eval_every": 4, "data.max_eval_rows": 64},
    "ppo": {"run.iterations": 2, "run.eval_every": 2, "data.max_eval_rows": 8, "rollout.max_new_tokens": 24},
}
"""Minutes are left of the whole path. GRPO has a better start, from which a hundred iterations show a gain."""


def test_the_page_has_the_table_of_the_committed_runs() -> None:
    result = json.loads((RESULTS / "gsm8k.json").read_text())
    metrics = {name: metric["value"] for name, metric in result["metrics"].items()}
    assert f"<!-- gsm8k -->\n\n{build_table(metrics)}\n\n" in PAGE.read_text()
    after = {name: value for name, value in metrics.items() if name.startswith("steps_grpo_after")}
    assert after and all(value > metrics[name.replace("after", "before")] for name, value in after.items())
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
        changes = SHORT[Path(words[1]).stem] if words[1].endswith(".toml") else {}
        outcome = hybridflow(*words, *(word for key, value in changes.items() for word in ("--set", f"{key}={value}")))
        assert outcome.exit_code == 0, outcome.errors
    summaries = {name: json.loads((tmp_path / "runs" / name / "summary.json").read_text()) for name in STAGES}
    for name in ("steps_sft", "problems_sft"):
        assert summaries[name]["lower_is_better"] and summaries[name]["score_after"] < summaries[name]["score_before"]
    low, high = summaries["reward"]["interval_after"]
    assert 0 < low < summaries["reward"]["score_after"] < high < 1
    assert {"score_before", "score_after", "kl_to_reference"} <= summaries["ppo"].keys()
    assert all(0 <= row["reward/solved/mean"] <= 1 for row in read_metrics(tmp_path / "runs" / "ppo"))
    assert 0.1 < summaries["steps_grpo"]["score_before"] < 0.6
    rewards = [row["reward/mean"] for row in read_metrics(tmp_path / "runs" / "steps_grpo")]
    assert sum(rewards[-20:]) / 20 > sum(rewards[:20]) / 20 + 0.02  # of 5,120 samples each
