"""Checks of what goes wrong: whose mistake it is, who is named, and of which kind the error is."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, lazy_stack

from hf_controller.data.futures import BatchFuture
from hf_controller.failures import RemoteCallError
from hf_controller.testing._expectations import build_batch, require, require_batch, require_raises
from hf_controller.testing._workers import StageWorker
from hf_protocols import BatchError, ProtocolError, RewardError, WorkerError

__all__ = [
    "check_exceptions_come_back_as_they_are",
    "check_exceptions_without_a_text_are_errors",
    "check_exits_end_a_call_in_one_error",
    "check_failed_inputs_are_the_first_failure",
    "check_fewer_rows_than_ranks_names_both_numbers",
    "check_futures_in_containers_are_refused",
    "check_protocols_beyond_the_batch_are_named",
    "check_results_are_as_registered",
    "check_rows_of_different_shapes_are_refused",
    "check_unknown_methods_name_the_known_ones",
    "check_what_cannot_be_split_is_refused",
    "check_what_cannot_travel_is_refused",
    "check_writing_into_shared_rows_is_an_error",
    "check_wrong_columns_are_named_though_not_read",
    "check_wrong_rows_and_columns_are_named",
]


def check_writing_into_shared_rows_is_an_error(stage: StageWorker) -> None:
    future = stage.two.echo(build_batch(4)).select(["x"])
    error = require_raises(BatchError, stage.two.write_in_place(future).result)
    require("wrote in place into x" in str(error), True, str(error))
    # That is why it is an error: there is one copy of the rows, for everybody.
    seen, written = future.result()["x"][:2].tolist(), (build_batch(4)["x"] + 1)[:2].tolist()
    require(seen, written, "what others see of rank 0's write")


_WRONG_RESULTS = (
    ("lose_a_row", BatchError),
    ("write_other", BatchError),
    ("return_dict", ProtocolError),
    ("count_in_words", ProtocolError),
)


def check_results_are_as_registered(stage: StageWorker) -> None:
    for method, kind in _WRONG_RESULTS:
        error = require_raises(kind, getattr(stage.two, method)(build_batch(4)).result)
        require(f"two.{method}" in str(error), True, str(error))


def check_fewer_rows_than_ranks_names_both_numbers(stage: StageWorker) -> None:
    for attempt in (lambda: stage.three.echo(build_batch(2)), stage.three.echo(stage.two.echo(build_batch(2))).result):
        error = require_raises(BatchError, attempt)
        require("2 rows" in str(error) and "3 " in str(error), True, str(error))


def check_wrong_rows_and_columns_are_named(stage: StageWorker) -> None:
    future = stage.two.echo(build_batch(4))
    for wrong in (
        future.rows([4]),
        future.select(["nothing"]),
        future.rename({"nothing": "x"}),
        future.rename({"x": "row"}),
        future.union(future.rows([0])),
        future.concat(future.select(["x"])),
        future.split(5)[0],
    ):
        here = str(require_raises(BatchError, wrong.result))
        require(here.endswith("; the batch comes from two.echo"), True, f"names the maker of the batch: {here}")
        there = str(require_raises(BatchError, stage.solo.echo(wrong).result))
        require(there, f"solo.echo: {here}", "names the reader of the batch, and its maker")
    mask = torch.tensor([True, False])
    for attempt in (
        lambda: future.rows([True, False]),
        lambda: future.rows(list(mask)),
        lambda: future.rows([-1]),
        lambda: future.repeat(0),
    ):
        require_raises(BatchError, attempt)


def check_rows_of_different_shapes_are_refused(stage: StageWorker) -> None:
    rows = lazy_stack([TensorDict({"x": torch.zeros(size)}, batch_size=[]) for size in (2, 3)])
    error = str(require_raises(BatchError, lambda: stage.two.echo(rows)))
    require("column x has rows of different shapes" in error, True, error)


def check_protocols_beyond_the_batch_are_named(stage: StageWorker) -> None:
    said = "two.echo_beyond: protocol 'one row too many' with 4 rows: rank 1 gets row [4], which does not exist"
    error = require_raises(ProtocolError, lambda: stage.two.echo_beyond(build_batch(4)))
    require(str(error), said, "error of a stored batch")
    error = require_raises(ProtocolError, stage.two.echo_beyond(stage.two.echo(build_batch(4))).result)
    require(str(error), said, "error of a result")


def check_wrong_columns_are_named_though_not_read(stage: StageWorker) -> None:
    known, unknown = stage.two.step(build_batch(4)), stage.two.echo(build_batch(4))
    for future, maker, other in ((known, "two.step", "start"), (unknown, "two.echo", "row")):
        for wrong, message in (
            (future.select(["x", "nothing"]), "select asks for nothing"),
            (future.rename({"nothing": "y"}), "rename asks for nothing"),
            (future.rename({other: "x"}), f"rename({{'{other}': 'x'}}) gives two columns one name"),
        ):
            error = str(require_raises(BatchError, partial(_add_one, stage, wrong)))
            require(error.startswith(f"solo.add: {message}"), True, f"names the reader of the batch: {error}")
            require(error.endswith(f"; the batch comes from {maker}"), True, f"names the maker of the batch: {error}")


def _add_one(stage: StageWorker, batch: BatchFuture) -> TensorDict:
    result: TensorDict = stage.solo.add(batch, amount=1.0).result()
    return result


_PLAIN_ROWS: tuple[Any, ...] = (
    ["one text", "another"],
    ("one text",),
    {"a text", "another"},
    [{"x": 1}, {"x": 2}],
    [[1, 2], [3]],
    {"x": [1, 2, 3]},
    {"prompt": ["a"], "answer": ["b"]},
)


def check_what_cannot_be_split_is_refused(stage: StageWorker) -> None:
    """Every rank would get all of them."""
    rows = torch.arange(4)
    for group in (stage.three, stage.two):
        for raw in (rows, [rows, rows], (build_batch(1),)):
            error = str(require_raises(ProtocolError, partial(group.echo, raw)))
            require(f"{group.role}.echo splits rows by DP_PROTO" in error, True, f"names the call: {error}")
            require("TensorDict({" in error and "{'name': value}" in error, True, f"names both ways out: {error}")
        for raw in _PLAIN_ROWS:
            error = str(require_raises(ProtocolError, partial(group.echo, raw)))
            start = f"{group.role}.echo splits rows by DP_PROTO and got a {type(raw).__name__} as argument 1"
            require(error.startswith(start), True, f"names the call and the argument: {error}")
            require("TensorDict({" in error and "ONE_TO_ALL" in error, True, f"names both ways out: {error}")
    require_raises(ProtocolError, lambda: stage.two.add(build_batch(4), amount=rows))
    whole = stage.two.add(build_batch(4), amount=torch.tensor(1.0)).result()
    require_batch(whole, TensorDict({"y": build_batch(4)["x"] * 2 + 1}, batch_size=[4]), "a number for all ranks")
    require(stage.two.answer(rows).result()["value"].tolist(), [0, 1, 2, 3], "a tensor for the one rank")
    require(stage.solo.answer({"rows": rows}).result()["value"]["rows"].tolist(), [0, 1, 2, 3], "a tensor in a dict")


def check_exceptions_come_back_as_they_are(stage: StageWorker) -> None:
    error = require_raises(RewardError, stage.free.fail(build_batch(4), "ours").result)
    require(str(error), "no reward today", "message")
    require(len(error.__notes__), 1, "notes")
    require("free.fail on rank 1" in error.__notes__[0], True, error.__notes__[0])
    other = require_raises(RemoteCallError, stage.free.fail(build_batch(4), "other").result)
    require((other.role, other.method, other.rank, other.cause_type), ("free", "fail", 1, "KeyError"), "attributes")
    require("in fail" in other.remote_traceback, True, other.remote_traceback)


def check_exits_end_a_call_in_one_error(stage: StageWorker) -> None:
    error = require_raises(RemoteCallError, stage.free.fail(build_batch(4), "exit").result)
    require((error.role, error.method, error.rank, error.cause_type), ("free", "fail", 1, "SystemExit"), "attributes")
    require(str(error), "free.fail on rank 1 failed: SystemExit: 3", "message")
    require("in fail" in error.remote_traceback, True, error.remote_traceback)
    require(stage.free.echo(build_batch(4)).num_rows, 4, "rows of a call afterwards")


def check_exceptions_without_a_text_are_errors(stage: StageWorker) -> None:
    error = require_raises(RemoteCallError, stage.free.fail(build_batch(4), "mute").result)
    require("its message cannot be shown: str() raised RuntimeError" in str(error), True, str(error))


def check_what_cannot_travel_is_refused(stage: StageWorker) -> None:
    made = stage.two.make_unpicklable()
    error = require_raises(RemoteCallError, made.result)
    require(
        str(error).startswith("two.make_unpicklable on rank 0 failed: ") and "pickle" in str(error), True, str(error)
    )
    error = require_raises(WorkerError, stage.solo.answer(made).result)
    require("cannot pickle '_thread.lock' object" in str(error), True, str(error))


def check_failed_inputs_are_the_first_failure(stage: StageWorker) -> None:
    failed = stage.free.fail(build_batch(4), "ours")
    error = require_raises(RewardError, stage.solo.center(stage.three.echo(failed)).result)
    require("free.fail on rank 1" in error.__notes__[0], True, error.__notes__[0])
    require(stage.free.echo(build_batch(4)).num_rows, 4, "rows of a call after a failure")


def check_futures_in_containers_are_refused(stage: StageWorker) -> None:
    future = stage.two.echo(build_batch(4))
    require_raises(ProtocolError, lambda: stage.two.answer([future]).result())


def check_unknown_methods_name_the_known_ones(stage: StageWorker) -> None:
    error = require_raises(AttributeError, lambda: stage.two.nothing)
    require("echo" in str(error) and "echo" in dir(stage.two), True, str(error))
