"""Each planned sample ends in one state, and the file says which."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from hf_algorithms.checkpoints import LEDGER, Ledger, LedgerError, count_ledger
from hf_algorithms.run_directory import RunDirectory
from hf_controller import BatchFuture, InProcessExecutor
from hf_protocols import BatchError

PROMPTS = [(0, 7, 0), (0, 3, 0), (1, 7, 0)]


def put(ids: list[tuple[int, int, int, int]]) -> BatchFuture:
    columns = {"sample_id": torch.tensor(ids), "scores": torch.ones(len(ids))}
    return InProcessExecutor().put(TensorDict(columns, batch_size=[len(ids)]))


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.begin()
    return directory


def test_samples_are_trained_filtered_or_dropped_once(directory: RunDirectory) -> None:
    ledger = Ledger(directory)
    ledger.begin(1, 2)
    ledger.plan(PROMPTS)
    assert ledger.counts == {"planned": 6, "trained": 0, "filtered": 0, "dropped": 0, "in_flight": 6}
    ledger.plan([(1, 2, 1)])
    ledger.note_filtered([1])
    ledger.note_trained(put([(0, 7, 0, 0), (0, 7, 1, 0), (1, 2, 1, 1), (1, 2, 1, 1), (9, 9, 9, 9)]))
    ledger.settle()
    expected = {"planned": 8, "trained": 3, "filtered": 2, "dropped": 3, "in_flight": 0}
    assert ledger.counts == count_ledger(directory.path / LEDGER) == expected
    lines = [json.loads(line) for line in (directory.path / LEDGER).read_text().splitlines()]
    assert lines[2] == {"iteration": 1, "state": "trained", "samples": 2, "prompts": [[0, 7, 0]]}
    assert lines[3] == {"iteration": 1, "state": "trained", "sample_ids": [[1, 2, 1, 1]]}


@pytest.mark.parametrize("groups", [[3], [0, -1], [1.5], ["a"]])
def test_a_prompt_that_was_not_drawn_cannot_be_filtered(directory: RunDirectory, groups: Any) -> None:
    """A step of a user's own names it; -1 would be taken for the last one."""
    ledger = Ledger(directory)
    ledger.begin(1, 2)
    ledger.plan(PROMPTS)
    with pytest.raises(
        BatchError, match=r"^context\.note_filtered\(.*\): .* of which this iteration has drawn 3\. Number"
    ):
        ledger.note_filtered(groups)
    ledger.note_filtered(torch.tensor([0, 2]))
    ledger.note_trained(put([(9, 9, 9, 9)]))
    ledger.settle()
    assert ledger.counts == {"planned": 6, "trained": 0, "filtered": 4, "dropped": 2, "in_flight": 0}


def test_a_batch_without_ids_trains_all_that_was_planned(directory: RunDirectory) -> None:
    ledger = Ledger(directory)
    ledger.begin(1, 2)
    ledger.plan(PROMPTS)
    ledger.note_filtered([1])
    ledger.note_trained(InProcessExecutor().put(TensorDict({"scores": torch.ones(2)}, batch_size=[2])))
    ledger.settle()
    expected = {"planned": 6, "trained": 6, "filtered": 0, "dropped": 0, "in_flight": 0}
    assert ledger.counts == count_ledger(directory.path / LEDGER) == expected


def test_samples_pass_through_generation_and_scoring(directory: RunDirectory) -> None:
    ledger = Ledger(directory)
    ledger.begin(1, 2)
    first, second = put([(0, 7, 0, 0)]), put([(1, 2, 0, 1)])
    ledger.plan(PROMPTS[:1])
    ledger.note_generated(first)
    ledger.note_generated(first)  # a step that generates twice for the same prompts
    ledger.note_scored(first)
    ledger.plan([(1, 2, 1)])
    ledger.note_generated(second)
    assert count_ledger(directory.path / LEDGER)["in_flight"] == 4, "of a run that was killed here"
    ledger.follow()
    ledger.settle()
    lines = [json.loads(line) for line in (directory.path / LEDGER).read_text().splitlines()]
    states = {each: [line["state"] for line in lines if [*each] in line["prompts"]] for each in (PROMPTS[0], (1, 2, 1))}
    assert states == {
        PROMPTS[0]: ["planned", "generating", "generated", "scored", "trained"],
        (1, 2, 1): ["planned", "generating", "generated", "trained"],
    }
    assert ledger.counts == count_ledger(directory.path / LEDGER)


def test_the_last_line_of_an_iteration_takes_all_to_the_disk(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr("os.fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    ledger = Ledger(directory)
    for iteration in (1, 2):
        ledger.begin(iteration, 2)
        ledger.plan(PROMPTS)
        ledger.note_generated(put([(0, 7, 0, 0)]))
        ledger.follow()
        assert len(sizes) == iteration - 1
        ledger.settle()
        assert sizes[-1] == (directory.path / LEDGER).stat().st_size


@pytest.mark.parametrize(("is_skipped", "state"), [(True, "dropped"), (False, "trained")])
def test_a_step_that_names_no_batch_learned_all_or_nothing(
    directory: RunDirectory, is_skipped: bool, state: str
) -> None:
    ledger = Ledger(directory, {"planned": 4, "trained": 4, "filtered": 0, "dropped": 0, "in_flight": 0})
    ledger.begin(2, 1)
    ledger.plan(PROMPTS)
    ledger.settle(is_skipped=is_skipped)
    assert ledger.counts[state] == (3 if is_skipped else 7)


def test_a_named_batch_is_dropped_if_no_update_stepped(directory: RunDirectory) -> None:
    """As where `overlong_filter` leaves no token of any response."""
    ledger = Ledger(directory)
    ledger.begin(1, 1)
    ledger.plan(PROMPTS)
    ledger.note_trained(put([(*prompt[:2], 0, prompt[2]) for prompt in PROMPTS]))
    ledger.settle(is_skipped=True)
    assert (ledger.counts["trained"], ledger.counts["dropped"]) == (0, len(PROMPTS))


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["planned", "trained", "trained"], "line 3: sample .* becomes trained and was trained"),
        (["planned", "planned"], "line 2: sample .* becomes planned and was planned"),
        (["planned", "scored", "generated"], "line 3: sample .* becomes generated and was scored"),
        (["planned", "trained", "scored"], "line 3: sample .* becomes scored and was trained"),
        (["planned", "spent"], "line 2: does not say which samples enter which state"),
        (["trained"], "line 1: sample .* becomes trained and was not planned"),
    ],
)
def test_a_sample_in_two_states_is_named(tmp_path: Path, lines: list[str], problem: str) -> None:
    body = {"iteration": 1, "samples": 1, "prompts": PROMPTS[:1]}
    (tmp_path / LEDGER).write_text("".join(json.dumps({**body, "state": state}) + "\n" for state in lines))
    with pytest.raises(LedgerError, match=problem):
        count_ledger(tmp_path / LEDGER)
