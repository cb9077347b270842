"""A run that was killed goes on as if it had not been: same metrics, same ledger, same files."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_algorithms import cli, export, sft
from hf_algorithms.checkpoints import LEDGER, count_ledger, find_commits
from hf_protocols import ConfigError
from small_runs import Outcome, read_metrics, without_times, write_sft

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "resume.md").read_text()
KILLER = """
import os, signal, time
from pathlib import Path

def kill_once(iteration, metrics):
    mark, run = Path(__file__).with_name("killed"), Path(__file__).with_name("run")
    if iteration == 3 and not mark.exists():
        for _ in range(6000):  # iteration 2 becomes durable meanwhile
            if (run / "steps" / "2" / "COMMIT").exists():
                break
            time.sleep(0.01)
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""
WORDS = (
    "--set", "run.checkpoint_every=1", "--set", "run.keep_best=1", "--set", "run.eval_every=2",
    "--set", "rollout.samples_per_prompt=2",
)  # fmt: skip
MEGATRON = ("training.backend=megatron", "model.num_layers=2", "model.num_heads=2")

STOPPER = """
import os, signal

def ask(iteration, metrics):
    if iteration == 2:
        os.kill(os.getpid(), signal.SIG{name})
"""


def run_apart(*arguments: object) -> int:
    """Returns the exit code of the command in a process of its own; that of a signal is negative."""
    child = os.fork()
    if child == 0:
        sys.argv = ["hybridflow", *map(str, arguments)]
        try:
            cli.main()
        except SystemExit as end:
            os._exit(end.code if isinstance(end.code, int) else 1)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    ("algorithm", "keys", "weights"),
    [
        ("grpo", (), "model.safetensors"),
        ("ppo", (), "model.safetensors"),
        pytest.param(
            "ppo",
            ("model.lora.rank=4", "optimizer.actor_learning_rate=1e-2"),
            "adapter_model.safetensors",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["grpo", "ppo", "ppo-lora"],
)
def test_a_killed_run_goes_on_bit_for_bit(
    small_config: Path, hybridflow: Callable[..., Outcome], algorithm: str, keys: tuple[str, ...], weights: str
) -> None:
    folder = small_config.parent
    (folder / "killer.py").write_text(KILLER)
    words = [*WORDS, *(w for key in (f"algorithm.name={algorithm}", "run.iterations=4", *keys) for w in ("--set", key))]
    killing = ("--set", f"run.on_metrics={folder / 'killer.py'}:kill_once")
    assert run_apart("train", small_config, *words, *killing) == -signal.SIGKILL
    run = folder / "run"
    assert json.loads((run / "summary.json").read_text())["status"] == "running"
    assert find_commits(run)[-1] == 2
    shutil.move(run, run := folder / "moved")
    assert not hybridflow("train", "--resume", run).errors
    whole = folder / "whole"
    assert hybridflow("train", small_config, *words, "--set", f"run.output_dir={whole}").exit_code == 0
    check_equal_runs(run, whole, weights)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["ledger"] == count_ledger(run / LEDGER)
    assert (summary["status"], summary["resumed_from"], summary["last_commit"]) == ("finished", [2], 4)
    evaluated = {row["iteration"]: row[name] for row in read_metrics(run) for name in row if "eval/validation" in name}
    best = max(evaluated, key=lambda each: (evaluated[each], -each))
    assert summary["best_commits"] == [best]
    assert find_commits(run) == sorted({best, 3, 4})
    kept = export(run, output_dir=folder / "kept", iteration=best).model_dir
    assert (kept / weights).read_bytes() == (run / f"steps/{best}/model" / weights).read_bytes()
    again = hybridflow("train", "--resume", run)
    assert again.exit_code == 0 and "has finished its 4 iterations" in again.output


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "own",
    [
        pytest.param((), id="fsdp"),
        pytest.param(("model.lora.rank=4",), marks=pytest.mark.matrix, id="lora"),
        pytest.param(MEGATRON, id="megatron"),
    ],
)
def test_a_killed_run_of_two_ranks_goes_on_bit_for_bit(
    small_config: Path, hybridflow: Callable[..., Outcome], cluster_address: str, own: tuple[str, ...]
) -> None:
    """The third iteration, which was done before the kill and is done again from the commit of the second."""
    folder, run = small_config.parent, small_config.parent / "run"
    (folder / "killer.py").write_text(KILLER)
    keys = ("run.executor=ray", f"cluster.address={cluster_address}", "cluster.gpus_per_machine=2",
            "run.iterations=3", "run.eval_every=3", "run.checkpoint_every=1", "algorithm.name=grpo",
            "rollout.samples_per_prompt=2", f"run.on_metrics={folder / 'killer.py'}:kill_once", *own)  # fmt: skip
    words = [word for key in keys for word in ("--set", key)]
    command = [Path(sys.executable).with_name("hybridflow"), "train", small_config, *words]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}  # of its reward
    # not a fork of this process, in which Ray may have run
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    assert find_commits(run)[-1] == 2
    before, ledger = read_metrics(run), (run / LEDGER).read_text()
    assert [row["iteration"] for row in before] == [1, 2, 3]
    outcome = hybridflow("train", "--resume", run)
    assert outcome.exit_code == 0, outcome.errors
    assert without_times(read_metrics(run)) == without_times(before)
    assert (run / LEDGER).read_text() == ledger
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["resumed_from"], summary["last_commit"]) == ("finished", [2], 3)


@pytest.mark.slow
def test_the_page_runs_as_written(
    small_config: Path, hybridflow: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, run = small_config.parent, small_config.parent / "runs" / "first"
    blocks = "".join(re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)).splitlines()
    commands = [line.split()[1:] for line in blocks if not line.startswith("#")]
    assert [command[0] for command in commands] == ["train"] * 4
    tables = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    keys = [tomllib.loads(table)["run"] for table in tables]
    assert [list(each) for each in keys] == [["checkpoint_every", "keep", "keep_best"], ["max_seconds", "grace_s"]]
    own = {"output_dir": "runs/first", "on_metrics": "killer.py:kill_once"}
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in {**keys[0], **keys[1], **own}.items()]
    text = re.sub("output_dir = .*\n", "".join(lines), small_config.read_text())
    (folder / "config.toml").write_text(text.replace("max_steps = 4", "max_steps = 0"))
    (folder / "killer.py").write_text(KILLER.replace("iteration == 3", "iteration == 2").replace("6000", "0"))
    monkeypatch.chdir(folder)
    assert run_apart(*commands[0]) == -signal.SIGKILL
    for command in commands[1:]:
        outcome = hybridflow(*command)
        assert outcome.exit_code == 0, outcome.errors
    assert "has finished its 20 iterations" in outcome.output
    assert [row["iteration"] for row in read_metrics(run)] == list(range(1, 21))
    assert find_commits(run)[-1] == 20


def test_a_warm_start_goes_on_bit_for_bit(small_config: Path, hybridflow: Callable[..., Outcome]) -> None:
    """One that ended without its mark, with more steps; and the run from the commit that ends the warm start."""
    run, whole = small_config.parent / "run", small_config.parent / "whole"
    keys = ("algorithm.name=grpo", "rollout.samples_per_prompt=2", "run.iterations=1", "run.checkpoint_every=1",
            "warm_start.eval_every=6")  # fmt: skip
    words = [word for key in keys for word in ("--set", key)]
    marks = ("--set", "warm_start.max_steps=6", "--set", "warm_start.stop_at=0.0")
    outcome = hybridflow("train", small_config, *words, "--set", "warm_start.stop_at=1.0")
    assert outcome.exit_code == 1 and "no evaluation reached warm_start.stop_at=1.0" in outcome.errors
    assert f"--resume {run} goes on in its warm start" in outcome.output
    last = find_commits(run / "warm_start")[-1]
    assert last in (3, 4) and not find_commits(run), "the last step may have been under way"
    allowed = ("--allow-changed", "warm_start.max_steps", "--allow-changed", "warm_start.stop_at")
    outcome = hybridflow("train", "--resume", run, *marks, *allowed)
    assert outcome.exit_code == 0, outcome.errors
    assert f"the warm start goes on after step {last}" in outcome.output
    assert hybridflow("train", small_config, *words, *marks, "--set", f"run.output_dir={whole}").exit_code == 0
    check_equal_runs(run, whole)
    assert find_commits(run) == [0, 1] and not (run / "warm_start").exists()
    shutil.rmtree(run / "steps" / "1")
    assert hybridflow("train", "--resume", run).exit_code == 0
    check_equal_runs(run, whole)
    assert json.loads((run / "summary.json").read_text())["resumed_from"] == [0]


def check_equal_runs(run: Path, whole: Path, weights: str = "model.safetensors") -> None:
    """Holds a run that was resumed against one that was not."""
    assert without_times(read_metrics(run)) == without_times(read_metrics(whole))
    assert (run / LEDGER).read_text() == (whole / LEDGER).read_text()
    assert (run / "model" / weights).read_bytes() == (whole / "model" / weights).read_bytes()
    summary, expected = (json.loads((each / "summary.json").read_text()) for each in (run, whole))
    for name in ("score_before", "score_after", "warm_start_steps", "model_iteration", "ledger", "kl_to_reference"):
        assert summary.get(name) == expected.get(name)


def test_a_supervised_run_is_refused_or_goes_on_in_python(
    small_config: Path, addition_data: Path, hybridflow: Callable[..., Outcome]
) -> None:
    folder = small_config.parent
    data = folder / "data"
    shutil.copytree(addition_data, data)
    small_config.write_text(small_config.read_text().replace(str(addition_data), str(data)))
    write_sft(small_config)
    words = ("--set", "run.checkpoint_every=1")
    assert hybridflow("sft", folder / "sft.toml", *words).exit_code == 0
    run, whole = folder / "run", folder / "whole"
    for refused, part in (
        (("train", "--resume", run), "train does not run it. Use hybridflow sft"),
        (("train", "--resume", run), f"--resume {run}: algorithm.name = 'sft': "),
        (("sft", folder / "sft.toml", "--resume", run), "Leave out CONFIG"),
        (("sft", "--resume", run, "--set", "run.seed=1"), "run.seed: 0 -> 1\nthe run would be another one"),
        (("sft", "--resume", data), "is not the directory of a run"),
    ):
        outcome = hybridflow(*refused)
        assert outcome.exit_code == 2 and part in outcome.errors, outcome.errors
    rows = (data / "train.jsonl").read_text()
    (data / "train.jsonl").write_text(rows + rows[: rows.index("\n") + 1])
    outcome = hybridflow("sft", "--resume", run, "--set", "run.iterations=4")
    assert outcome.exit_code == 2 and f"{data}/train.jsonl: it is not the file" in outcome.errors
    (data / "train.jsonl").write_text(rows)
    with pytest.raises(ConfigError, match="Leave out model"):
        sft("a-model", resume=run)
    result = sft(resume=run, set={"run.iterations": 4})
    assert hybridflow("sft", folder / "sft.toml", *words, "--set", "run.iterations=4", "--set",
                      f"run.output_dir={whole}").exit_code == 0  # fmt: skip
    assert without_times(result.metrics) == without_times(read_metrics(whole))
    assert (run / LEDGER).read_text() == (whole / LEDGER).read_text()
    assert result.summary["score_after"] == json.loads((whole / "summary.json").read_text())["score_after"]


@pytest.mark.parametrize(("name", "code"), [("TERM", 143), ("HUP", 129)])
def test_a_run_stops_with_a_commit_after_a_signal(
    small_config: Path, capfd: pytest.CaptureFixture[str], name: str, code: int
) -> None:
    folder = small_config.parent
    config, run = write_sft(small_config), folder / "run"
    (folder / "stopper.py").write_text(STOPPER.format(name=name))
    keys = ("run.iterations=100000", "run.eval_every=100000", f"run.on_metrics={folder / 'stopper.py'}:ask")
    assert run_apart("sft", config, *(word for key in keys for word in ("--set", key))) == code
    summary = json.loads((run / "summary.json").read_text())
    last = summary["iterations"]
    assert (summary["status"], summary["last_commit"]) == ("interrupted", last)
    assert find_commits(run) == [last]
    assert len(read_metrics(run)) == last >= 2
    shown = capfd.readouterr()
    assert f"hybridflow sft --resume {run} goes on after iteration {last}" in shown.out
    assert f"SIG{name}: the run stops after this iteration" in shown.err


def test_a_run_in_python_returns_where_its_time_is_over(small_config: Path) -> None:
    config, run = write_sft(small_config), small_config.parent / "run"
    summary = sft(config=config, set={"run.max_seconds": 0.001}).summary
    assert (summary["status"], summary["iterations"], summary["last_commit"]) == ("interrupted", 1, 1)
    assert sft(resume=run, set={"run.max_seconds": 600.0}).summary["status"] == "finished"


def test_a_run_that_is_ended_at_once_has_no_error(small_config: Path) -> None:
    folder = small_config.parent
    config = write_sft(small_config)
    (folder / "stopper.py").write_text(STOPPER.format(name="TERM") + STOPPER.format(name="TERM").splitlines()[-1])
    keys = ("run.iterations=100000", "run.eval_every=100000", f"run.on_metrics={folder / 'stopper.py'}:ask")
    assert run_apart("sft", config, *(word for key in keys for word in ("--set", key))) == 143
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("interrupted", None)
