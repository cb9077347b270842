"""`[[evaluation]]` in a small run: its curves, its cadence, its samples, and `evaluate` on what the run left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from small_runs import Outcome, read_metrics, read_samples

SETS = """
[[evaluation]]
name = "often"
data = "{data}/validation.jsonl"
metrics = ["exact_match", "small_runs:response_length"]
samples = 4
temperature = 1.0
max_new_tokens = 3
rows = 5
every = 1
[[evaluation]]
name = "last"
data = "{data}/test.jsonl"
rows = 3
every = 9
"""


def test_sets_are_evaluated_in_their_turn(
    small_config: Path, addition_data: Path, hybridflow: Callable[..., Outcome]
) -> None:
    small_config.write_text(small_config.read_text() + SETS.format(data=addition_data))
    outcome = hybridflow("train", small_config)
    assert outcome.exit_code == 0, outcome.errors
    run = small_config.with_name("run")
    first, second = read_metrics(run)
    often = {f"exact_match{end}" for end in ("", "/avg@4", "/pass@1", "/pass@2", "/pass@4")}
    often |= {each.replace("exact_match", "response_length") for each in often}
    assert {name for name in first if name.startswith("eval/often/")} == {f"eval/often/{each}" for each in often}
    assert {name for name in second if name.startswith("eval/last/")} == {"eval/last/exact_match"}
    assert not any(name.startswith("eval/last/") for name in first)
    for iteration, row in enumerate((first, second), start=1):
        samples = read_samples(run, iteration, "often")
        assert [(each["row"], each["sample"]) for each in samples] == [(row, k) for row in range(5) for k in range(4)]
        assert max(each["tokens"] for each in samples) <= 3
        lengths = [each["scores"]["response_length"] for each in samples]
        assert row["eval/often/response_length"] == pytest.approx(sum(lengths) / 20)
        assert read_samples(run, iteration, "validation")
    assert [len(read_samples(run, iteration, "last")) for iteration in (1, 2)] == [0, 3]
    assert not read_samples(run, 0, "often")

    # The run's model is the one that the last iteration evaluated, and its configuration has the defaults.
    outcome = hybridflow("evaluate", run, "--data", "last", "--data", "test", "--rows", 3, "--json")
    assert outcome.exit_code == 0, outcome.errors
    found = json.loads(outcome.output)
    assert found["metrics"]["eval/last/exact_match"] == second["eval/last/exact_match"]
    assert found["sets"]["test"]["metrics"] == found["sets"]["last"]["metrics"]
    outcome = hybridflow("export", run, "--output", run.with_name("out"), "--iteration", 1)
    assert (outcome.exit_code, "iteration, but those of 2. Choose one" in outcome.errors) == (2, True)
    assert hybridflow("export", run, "--output", run.with_name("out"), "--iteration", 2).exit_code == 0


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            'name = "a"\ndata = "absent.jsonl"',
            "evaluation[0].data: absent.jsonl: no such file or directory",
        ),
        ('name = "a"\ndata = "{rows}"\nmetrics = ["exact_mach"]', "evaluation[0].metrics = 'exact_mach' does not"),
        (
            'name = "a"\ndata = "{rows}"\nsamples = 2',
            "evaluation[0].samples = 2: at temperature = 0 all would",
        ),
        ('name = "test"\ndata = "{rows}"', "evaluation[0].name = 'test': is that of the rows of data.test in metrics"),
        (
            'name = "a"\ndata = "{rows}"\nevry = 2',
            "unknown key 'evaluation[0].evry': did you mean 'evaluation[0].every'?",
        ),
        (
            'name = "a"\ndata = "{rows}"\nmax_new_tokens = 20',
            "(evaluation[0].max_new_tokens) are above the model",
        ),
        (
            'name = "a"\ndata = "{rows}"\n[[evaluation]]\nname = "a"\ndata = "{rows}"',
            "evaluation[1].name = 'a': evaluation[0] has this name, too",
        ),
        ('name = "a"', "evaluation[0].data is missing"),
    ],
)
def test_a_set_that_cannot_be_evaluated_is_refused(
    small_config: Path, addition_data: Path, hybridflow: Callable[..., Outcome], table: str, message: str
) -> None:
    table = table.format(rows=addition_data / "test.jsonl")
    small_config.write_text(f"{small_config.read_text()}[[evaluation]]\n{table}\n")
    outcome = hybridflow("train", small_config)
    assert outcome.exit_code == 2
    assert message in outcome.errors
    assert not small_config.with_name("run").exists()
