"""The ledger of a run: where every sample that was planned ended."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_protocols import BatchError, HybridFlowError
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_algorithms.run_directory import RunDirectory
    from hf_controller import BatchFuture

__all__ = ["LEDGER", "STATES", "Ledger", "LedgerError", "count_ledger"]

LEDGER = "ledger.jsonl"
_IN_FLIGHT = ("planned", "generating", "generated", "scored")
_ENDS = ("trained", "filtered", "dropped")
STATES = (*_IN_FLIGHT, *_ENDS)
"""States in the file's lines. A sample enters each at most once, in this order, and ends in one of the last three."""

_MOST_SAMPLES = 1 << 16
"""Responses to one prompt, in a file that may be damaged."""

Prompt = tuple[int, int, int]
"""Epoch, row and attempt: a `prompt_id`."""
SampleId = tuple[int, int, int, int]
"""Epoch, row, number among the prompt's samples, and attempt: a `sample_id`."""


class LedgerError(HybridFlowError):
    """Samples that are lost, or in two states."""


class Ledger:
    """Writes `ledger.jsonl`: one line for the samples of an iteration that enter a state.

    A line is `{iteration, state, samples, prompts}`, where all `samples` responses to these prompts are in the state,
    or `{iteration, state, sample_ids}`. Prompts are epoch, row and attempt; ids are those of the column `sample_id`.

    Args:
        directory: of the run.
        counts: of an earlier part of the run, by state.
    """

    def __init__(self, directory: RunDirectory, counts: Mapping[str, int] | None = None) -> None:
        self._directory = directory
        self._counts = dict.fromkeys(("planned", *_ENDS), 0) | dict(counts or {})
        self._counts.pop("in_flight", None)
        self._fresh: list[Prompt] = []
        self._num_generating = 0
        self._awaited: list[tuple[str, Sequence[Prompt], BatchFuture]] = []
        self._begin(0, 1)

    @property
    def counts(self) -> dict[str, int]:
        """Samples of the run by how they ended; `planned` counts all, `in_flight` those that have not ended."""
        settled = sum(self._counts[state] for state in _ENDS)
        return {**self._counts, "in_flight": self._counts["planned"] - settled}

    def begin(self, iteration: int, samples: int) -> None:
        """Starts an iteration with so many responses to each prompt."""
        self._begin(iteration, samples)

    def plan(self, prompts: Sequence[Prompt]) -> None:
        """Takes prompts that were drawn, before anything is generated."""
        self._prompts += prompts
        self._counts["planned"] += len(prompts) * self._samples
        self._write("planned", prompts)

    def note_generated(self, batch: BatchFuture) -> None:
        """Takes the responses that are being generated to the prompts that were drawn last."""
        fresh = self._prompts[self._num_generating :]
        if fresh:
            self._fresh, self._num_generating = fresh, len(self._prompts)
            self._write("generating", fresh)
            self._await("generated", batch)

    def note_scored(self, batch: BatchFuture) -> None:
        """Takes these responses with their scores."""
        self._await("scored", batch)

    def follow(self) -> None:
        """Waits for responses and for their scores, and notes both as they come.

        Raises:
            HybridFlowError: if a call failed that makes them.
        """
        awaited, self._awaited = self._awaited, []
        for state, prompts, batch in awaited:
            batch.wait()
            self._write(state, prompts)

    def note_trained(self, batch: BatchFuture) -> None:
        """Takes the rows that updates of this iteration learn."""
        self._batches.append(batch)

    def note_filtered(self, groups: Iterable[int]) -> None:
        """Takes the numbers of prompts, in the order in which the iteration drew them, whose responses are left out.

        Raises:
            BatchError: for a number that no prompt of the iteration has.
        """
        given = list(groups)
        known = range(len(self._prompts))
        if strangers := [each for each in given if each not in known]:
            raise BatchError(
                f"context.note_filtered({show(given)}): {show(strangers[0])} is not the number of a prompt, of which "
                f"this iteration has drawn {len(known)}. Number them from 0, in the order in which they were drawn"
            )
        self._filtered.update(map(int, given))

    def settle(self, *, is_skipped: bool = False) -> None:
        """Gives every sample of the iteration its last state, once its metrics are known.

        Samples are trained if a batch has them, else filtered or dropped. A batch without ids trains all
        planned samples, and so does a step that names no batch.

        Args:
            is_skipped: no update of the iteration took a step, so nothing was trained.

        Raises:
            LedgerError: if the states do not add up to the samples that were planned.
        """
        planned = {(*prompt[:2], number, prompt[2]) for prompt in self._prompts for number in range(self._samples)}
        trained = self._read_trained(planned) if self._batches else planned
        if is_skipped:
            trained = set()
        of_groups = {(*self._prompts[group][:2], self._prompts[group][2]) for group in self._filtered}
        filtered = {each for each in planned - trained if (*each[:2], each[3]) in of_groups}
        self._move("trained", trained)
        self._move("filtered", filtered)
        self._move("dropped", planned - trained - filtered)
        self._begin(self._iteration, self._samples)
        self.check()

    def drop(self, iteration: int, samples: int, prompts: Sequence[Prompt]) -> None:
        """Takes prompts that an iteration passes over, with so many responses to each: planned and dropped."""
        self.begin(iteration, samples)
        self.plan(prompts)
        self.settle(is_skipped=True)

    def check(self) -> None:
        """Checks planned = trained + filtered + dropped + in flight between iterations, when nothing is in flight.

        Raises:
            LedgerError: naming the counts.
        """
        if self.counts["in_flight"]:
            shown = ", ".join(f"{state} {count}" for state, count in self.counts.items())
            raise LedgerError(f"{LEDGER}: its states do not add up after iteration {self._iteration}: {shown}")

    def _begin(self, iteration: int, samples: int) -> None:
        self._iteration, self._samples = iteration, samples
        self._prompts: list[Prompt] = []
        self._batches: list[BatchFuture] = []
        self._filtered: set[int] = set()
        self._fresh, self._num_generating, self._awaited = [], 0, []

    def _await(self, state: str, batch: BatchFuture) -> None:
        """Notes `batch` of the prompts that wait for one, once for each state."""
        if self._fresh and not any(known == state and of is self._fresh for known, of, _ in self._awaited):
            self._awaited.append((state, self._fresh, batch))

    def _read_trained(self, planned: set[SampleId]) -> set[SampleId]:
        found: set[SampleId] = set()
        for batch in self._batches:
            columns = batch.select(["sample_id?"]).result()
            if "sample_id" not in columns:
                return planned
            found.update((epoch, row, number, attempt) for epoch, row, number, attempt in columns["sample_id"].tolist())
        # a step of one's own may learn more than it was given
        return found & planned

    def _move(self, state: str, ids: set[SampleId]) -> None:
        self._counts[state] += len(ids)
        whole = [
            prompt
            for prompt in self._prompts
            if all((*prompt[:2], number, prompt[2]) in ids for number in range(self._samples))
        ]
        of_whole = {(*prompt[:2], number, prompt[2]) for prompt in whole for number in range(self._samples)}
        if whole:
            self._write(state, whole)
        if rest := sorted(ids - of_whole):
            self._append({"iteration": self._iteration, "state": state, "sample_ids": rest})

    def _write(self, state: str, prompts: Sequence[Prompt]) -> None:
        body = {"iteration": self._iteration, "state": state, "samples": self._samples, "prompts": prompts}
        self._append(body)

    def _append(self, body: Mapping[str, Any]) -> None:
        # Syncing a sample's last state syncs the lines before it; an iteration that is cut off earlier is repeated.
        self._directory.append_line(LEDGER, json.dumps(body), must_last=body["state"] in _ENDS)


def count_ledger(path: Path) -> dict[str, int]:
    """Counts the samples of a file by their state, and checks that each ended once.

    Args:
        path: of `ledger.jsonl`.

    Raises:
        LedgerError: for a file that cannot be read, and, with its line, for a sample that is planned twice, in two
            states or in none that was planned.
    """
    states: dict[tuple[int, SampleId], str] = {}
    for number, line in enumerate(_read_lines(path), 1):
        where = f"{path}, line {number}"
        iteration, state, ids = _parse_line(line, where)
        for each in ids:
            before = states.get((iteration, each))
            if not _may_follow(before, state):
                raise LedgerError(
                    f"{where}: sample {list(each)} of iteration {iteration} becomes {state} and was "
                    f"{before or 'not planned'}: the file was changed by hand or damaged"
                )
            states[iteration, each] = state
    found = list(states.values())
    counts = {state: found.count(state) for state in _ENDS}
    return {"planned": len(found), **counts, "in_flight": len(found) - sum(counts.values())}


def _may_follow(before: str | None, state: str) -> bool:
    if before is None:
        return state == "planned"
    return before in _IN_FLIGHT and STATES.index(before) < STATES.index(state)


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise LedgerError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise LedgerError(f"{path}: is not a text in UTF-8. Restore it, or start another run") from None


def _parse_line(line: str, where: str) -> tuple[int, str, list[SampleId]]:
    """Iteration, state and samples of a line."""
    try:
        body = json.loads(line)
        iteration, state, ids = body["iteration"], body["state"], _list_ids(body)
        if type(iteration) is not int or state not in STATES:
            raise ValueError("not an iteration, or not a state")
    except (ValueError, LookupError, TypeError, RecursionError):
        raise LedgerError(
            f"{where}: does not say which samples enter which state. Restore it, or start another run"
        ) from None
    return iteration, state, ids


def _list_ids(body: Mapping[str, Any]) -> list[SampleId]:
    """Samples of a line.

    Raises:
        ValueError: for something else.
    """
    if "sample_ids" in body:
        ids = [(epoch, row, number, attempt) for epoch, row, number, attempt in body["sample_ids"]]
    else:
        samples, prompts = body["samples"], body["prompts"]
        if type(samples) is not int or not 0 < samples <= _MOST_SAMPLES:
            raise ValueError("not a number of samples")
        ids = [(epoch, row, number, attempt) for epoch, row, attempt in prompts for number in range(samples)]
    if any(type(value) is not int for each in ids for value in each):
        raise ValueError("not an id")
    return ids
