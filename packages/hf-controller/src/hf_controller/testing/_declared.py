"""Checks of calls whose arguments declare columns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tensordict import TensorDict

from hf_controller.testing._expectations import build_batch, require, require_batch, require_raises
from hf_controller.testing._workers import StageWorker, Total
from hf_protocols import BatchError, PerRank, ProtocolError

__all__ = ["DECLARED_COLUMNS"]


def check_arguments_declare_columns(stage: StageWorker) -> None:
    batch = build_batch(7)
    for given in (batch, stage.two.echo(batch), stage.executor.put(batch)):
        result = stage.three.apply(given, Total(reads=("x", "row", "nothing?"))).result()
        require_batch(result, TensorDict({"total": batch["x"] + batch["row"]}, batch_size=[7]))
        result = stage.three.apply(given, total=Total(reads=["byte"], writes=["a", "b"])).result()
        require_batch(result, TensorDict(dict.fromkeys(("a", "b"), batch["byte"].float()), batch_size=[7]))
    total = stage.three.apply(stage.two.echo(batch), Total(reads=("x",)))
    doubled = stage.two.apply(total.union(stage.two.echo(batch)), Total(reads=("total", "x"), writes=("twice",)))
    require_batch(doubled.result(), TensorDict({"twice": batch["x"] * 2}, batch_size=[7]))


def check_only_declared_columns_travel(stage: StageWorker) -> None:
    batch = build_batch(4)
    for given in (batch, stage.two.echo(batch)):
        arrived = stage.two.list_columns(given, Total(reads=("x", "flag?", "nothing?")), Total(reads=("byte",)))
        require(sorted(arrived.result()), ["byte", "flag", "row", "x"], "columns that arrived")
        require(sorted(stage.two.list_columns(given).result()), ["row"], "columns without an argument")


def check_ranks_have_arguments_of_their_own(stage: StageWorker) -> None:
    batch = build_batch(3)
    parts = [stage.three.echo(batch).select(["row", name]) for name in ("x", "byte")]
    totals = PerRank([Total(reads=("x",), writes=("of_x",)), Total(reads=("byte",), writes=("of_byte",))])
    own = stage.two.apply_own(PerRank(parts), totals)
    for name, result in zip(("x", "byte"), own.result(), strict=True):
        require_batch(result, TensorDict({f"of_{name}": batch[name].float()}, batch_size=[3]))
    again = stage.solo.apply(own.items[0].union(parts[0]), Total(reads=("of_x",))).result()
    require_batch(again, TensorDict({"total": batch["x"]}, batch_size=[3]))


def check_missing_declared_columns_are_named(stage: StageWorker) -> None:
    total = Total(reads=("nothing", "x", "never"))
    start = "solo.apply: Total reads never, nothing; the batch has "
    known = stage.two.step(build_batch(4)).union(stage.two.apply(build_batch(4), Total(reads=("x",), writes=("row",))))
    stage.executor.trace.drain()
    for given in (known, build_batch(4).select("row", "x")):
        error = str(require_raises(BatchError, partial(stage.solo.apply, given, total)))
        require(error.startswith(start), True, f"names method, class, column and what there is: {error}")
        require(" row," in error, True, f"names the columns that are there: {error}")
    require([span for span in stage.executor.trace.drain() if span.role == "solo"], [], "spans of refused calls")
    for role in ("solo", "three"):  # the second balances tokens, and asks for lengths first
        late = getattr(stage, role).apply(stage.two.echo(build_batch(4)), total)
        error = str(require_raises(BatchError, late.result))
        start = f"{role}.apply: Total reads never, nothing; the batch has "
        require(error.startswith(start), True, f"names them where the columns were unknown before: {error}")
        require("made by two.echo" in error, True, f"names what made the batch: {error}")


def check_results_are_as_arguments_declare(stage: StageWorker) -> None:
    wrong = stage.two.apply(build_batch(4), Total(reads=(), returned=("other",)))
    error = str(require_raises(BatchError, wrong.result))
    require("two.apply got Total.writes=['total'] and returned the columns ['other']" in error, True, error)


def check_declarations_are_names_of_columns(stage: StageWorker) -> None:
    for total, message in (
        (Total(reads="x"), "two.apply: Total.reads='x' is one string. Use a list of column names, ['x']"),
        (Total(reads=(1, 2)), "two.apply: Total.reads=(1, 2). Use a list of column names"),
        (Total(reads=None), "two.apply: Total.reads=None. Use a tuple of column names"),
        (Total(reads=(), writes=("a?",)), "two.apply: Total.writes=('a?',): 'a?' ends in ?, which"),
        (Total(reads=(), writes=()), "two.apply: Total.writes=() names no column"),
        (object(), "two.apply returns the columns that an argument declares, and no argument declares `writes`"),
    ):
        error = str(require_raises(ProtocolError, partial(stage.two.apply, build_batch(4), total)))
        require(error.startswith(message), True, error)


DECLARED_COLUMNS: tuple[Callable[[StageWorker], None], ...] = (
    check_arguments_declare_columns,
    check_only_declared_columns_travel,
    check_ranks_have_arguments_of_their_own,
    check_missing_declared_columns_are_named,
    check_results_are_as_arguments_declare,
    check_declarations_are_names_of_columns,
)
"""The checks of this module."""
