"""The checks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from hf_controller.data.futures import BatchFuture
from hf_controller.testing._declared import DECLARED_COLUMNS
from hf_controller.testing._expectations import build_batch, require, require_batch, require_raises, sum_tokens
from hf_controller.testing._mistakes import (
    check_exceptions_come_back_as_they_are,
    check_exceptions_without_a_text_are_errors,
    check_exits_end_a_call_in_one_error,
    check_failed_inputs_are_the_first_failure,
    check_fewer_rows_than_ranks_names_both_numbers,
    check_futures_in_containers_are_refused,
    check_protocols_beyond_the_batch_are_named,
    check_results_are_as_registered,
    check_rows_of_different_shapes_are_refused,
    check_unknown_methods_name_the_known_ones,
    check_what_cannot_be_split_is_refused,
    check_what_cannot_travel_is_refused,
    check_writing_into_shared_rows_is_an_error,
    check_wrong_columns_are_named_though_not_read,
    check_wrong_rows_and_columns_are_named,
)
from hf_controller.testing._workers import StageWorker
from hf_protocols import BatchError, PerRank, ProtocolError, split_rows

__all__ = ["conformance_checks"]

Check = Callable[[StageWorker], None]


def conformance_checks(*, collectives: bool = True) -> tuple[Check, ...]:
    """Returns every check; without `collectives` only those that do not use collectives."""
    return _WITHOUT_COLLECTIVES + (_WITH_COLLECTIVES if collectives else ())


def check_rows_reach_the_ranks_of_their_protocol(stage: StageWorker) -> None:
    batch = build_batch(7)
    result = stage.two.echo(batch).result()
    require_batch(result.select("row", "x", "tokens"), batch.select("row", "x", "tokens"))
    require(result["rank"].tolist(), [0, 0, 0, 0, 1, 1, 1], "rank of each row")


def check_own_protocol_keeps_the_order_of_rows(stage: StageWorker) -> None:
    for group, size in ((stage.two, 2), (stage.three, 3)):
        result = group.echo_round_robin(group.echo(build_batch(7)).select(["row", "tokens"])).result()
        require(result["rank"].tolist(), [row % size for row in range(7)], "rank of each row")
        require_batch(result.select("row", "tokens"), build_batch(7).select("row", "tokens"))


def check_own_protocol_reaches_every_rank_with_rows(stage: StageWorker) -> None:
    for rows, seen in ((10, [4, 6]), (3, [3, 0])):
        for batch in (build_batch(rows), stage.two.echo(build_batch(rows))):
            require(stage.two.see_block(batch).result(), {"rows": seen[0]}, "rows of the collected rank")
            require(stage.two.saw().result(), seen, "rows of each rank")
    batch = build_batch(10)
    result = stage.two.echo_two_chunks(batch).result()
    require(result["rank"].tolist(), [0, 0, 0, 1, 1, 1, 0, 0, 1, 1], "rank of each row")
    require_batch(result.select("row", "tokens"), batch.select("row", "tokens"))


def check_kinds_of_columns_come_back_as_they_were(stage: StageWorker) -> None:
    batch = build_batch(7)
    for _ in range(2):
        batch = stage.two.echo(stage.two.echo(batch).select(list(batch.keys()))).select(list(batch.keys())).result()
    require_batch(batch, build_batch(7))


def check_rows_move_between_groups_of_other_chunks(stage: StageWorker) -> None:
    batch = build_batch(7)
    columns = list(batch.keys())
    there = stage.two.echo(batch).select(columns)
    back = stage.two.echo(stage.three.echo(there).select(columns)).select(columns)
    require_batch(back.result(), batch)
    require(back.num_rows, 7, "number of rows")


def check_one_rank_of_a_replica_is_collected(stage: StageWorker) -> None:
    require(stage.sharded.echo(build_batch(4)).result()["rank"].tolist(), [0, 0, 1, 1], "DP counts every rank")
    require(stage.sharded.count(build_batch(4)).result()["rows"], 2.0, "rows per rank")


def check_algebra_of_futures_is_that_of_tensordicts(stage: StageWorker) -> None:
    batch, other = build_batch(6), build_batch(6, seed=1)
    future, beside = stage.two.echo(batch).select(["x", "tokens"]), stage.three.echo(other).select(["x", "tokens"])
    eager, eager_beside = batch.select("x", "tokens"), other.select("x", "tokens")
    joined = torch.cat([eager, eager_beside])
    cases: list[tuple[BatchFuture, Any]] = [
        (future.rows([5, 0, 3, 3]), eager[torch.tensor([5, 0, 3, 3])]),
        (future.rows(range(1, 4)), eager[1:4]),
        (future.split(4)[0], eager[:2]),
        (future.split(4)[3], eager[5:]),
        (future.repeat(3), eager[torch.arange(6).repeat_interleave(3)]),
        (future.concat(beside), joined),
        (future.concat(beside).rows([11, 0, 6, 5]), joined[torch.tensor([11, 0, 6, 5])]),
        (future.union(beside.rename({"x": "x2"}).select(["x2"])), eager.clone().set("x2", eager_beside["x"])),
        (future.union(beside), eager_beside),
        (future.repeat(2).split(2)[1].rows([0, 5]), eager[torch.tensor([3, 5])]),
    ]
    for index, (lazy, expected) in enumerate(cases):
        require(lazy.num_rows, len(expected), f"rows of case {index}")
        require_batch(lazy.result(), expected, f"case {index}")
        require_batch(stage.solo.echo(lazy).select(list(expected.keys())).result(), expected, f"argument {index}")


def check_batches_may_come_from_a_long_loop(stage: StageWorker) -> None:
    batch = build_batch(3)
    future = stage.two.echo(batch).select(["row", "tokens"])
    gathered, turned = future, future
    for turn in range(1, 1501):
        turned = turned.rows([1, 2, 0])
        gathered = gathered.concat(future.rows([(row + turn) % 3 for row in range(3)]))
    require(gathered.num_rows, 3 * 1501, "rows")
    rows = [(row + turn) % 3 for turn in range(1501) for row in range(3)]
    result = stage.solo.echo(gathered).result()
    require(result["row"].tolist(), rows, "row")
    require(result["tokens"].offsets().diff().tolist(), rows, "tokens of each row")
    require_batch(stage.solo.echo(turned).select(["row", "tokens"]).result(), batch.select("row", "tokens"))
    require(stage.solo.echo(turned.concat(*[future] * 1500)).num_rows, 3 * 1501, "rows of one concat")


def check_rows_times_keeps_the_prompt_major_order(stage: StageWorker) -> None:
    result = stage.two.sample(build_batch(5), n=3).result()
    require(result["row"].tolist(), [row for row in range(5) for _ in range(3)], "row")
    require(result["sample"].tolist(), [0, 1, 2] * 5, "sample")
    none = stage.two.sample(build_batch(5), n=0)
    require((none.num_rows, none.result()["row"].tolist()), (0, []), "no row of each")


def check_token_balance_does_not_reorder_rows(stage: StageWorker) -> None:
    batch = build_batch(12, tokens=[40, 38, 36, 34, 1, 1, 1, 1, 1, 1, 1, 1])
    require(stage.three.sample(batch, n=2).result()["row"].tolist(), [r for r in range(12) for _ in range(2)], "row")
    require_batch(stage.three.echo(batch).select(["row", "tokens"]).result(), batch.select("row", "tokens"))
    counts = stage.three.count_tokens(batch).result()
    contiguous = max(sum(batch["tokens"].offsets().diff().tolist()[r] for r in rows) for rows in split_rows(12, 3))
    require(max(counts.values()) < contiguous / 1.5, True, f"{counts} against {contiguous} of a contiguous split")


def check_unknown_rows_follow_in_collected_order(stage: StageWorker) -> None:
    require(stage.two.keep_even(build_batch(7)).result()["row"].tolist(), [0, 2, 4, 6], "row")


def check_only_columns_that_are_read_travel(stage: StageWorker) -> None:
    batch = build_batch(4)
    require_batch(stage.two.add(batch, amount=1.0).result(), TensorDict({"y": batch["x"] * 2 + 1}, batch_size=[4]))
    error = require_raises(BatchError, lambda: stage.two.add(batch.select("row")))
    require("x" in str(error) and "row" in str(error), True, f"names missing and existing columns: {error}")
    later = stage.two.add(stage.two.echo(batch).select(["row", "rank"]))
    error = require_raises(BatchError, later.result)
    require("rank, row" in str(error), True, f"names the existing columns: {error}")


def check_two_batches_are_split_alike(stage: StageWorker) -> None:
    left, right = build_batch(7), build_batch(7, seed=1)
    result = stage.three.join(left, right=stage.two.echo(right).select(["x"])).result()
    require_batch(result, TensorDict({"a": left["x"], "b": right["x"]}, batch_size=[7]))


def check_a_method_takes_its_rows_in_pieces(stage: StageWorker) -> None:
    whole = stage.solo.echo(build_batch(7)).select(["tokens"])
    halves = stage.two.echo(build_batch(7)).select(["row"])
    pieces = [([0, 1, 2, 3], [0, 1, 2, 3]), ([4, 5, 6], [4, 5, 6])]
    require(stage.solo.see_pieces(halves.union(whole)).result(), [pieces], "pieces of the producers' rows")
    chosen = halves.union(whole).rows([5, 6, 2, 2])
    pieces = [([5, 6], [5, 6]), ([2], [2]), ([2], [2])]
    require(stage.solo.see_pieces(chosen).result(), [pieces], "pieces of chosen rows")


def check_listed_results_feed_all_to_all(stage: StageWorker) -> None:
    batch = build_batch(3)
    listed = stage.two.copy_all(batch)
    copies = listed.result()
    require([copy["rank"].tolist() for copy in copies], [[0] * 3, [1] * 3], "ranks")
    again = stage.two.take_own(listed, factor=PerRank([10, 20])).result()
    require([item["row"].tolist() for item in again], [[0, 10, 20], [0, 20, 40]], "items")
    own = stage.two.take_own(PerRank([batch[:1], stage.two.echo(batch).rows([2, 1])]), factor=1).result()
    require([item["row"].tolist() for item in own], [[0], [2, 1]], "items")
    require_raises(ProtocolError, lambda: stage.two.echo(listed))
    require_raises(ProtocolError, lambda: stage.two.take_own(batch, factor=1))
    require_raises(ProtocolError, lambda: stage.three.take_own(listed, factor=1))


def check_listed_objects_feed_all_to_all(stage: StageWorker) -> None:
    listed = stage.two.where()
    heard = stage.two.hear(listed).result()
    require(heard, [(0, (0, 2, "two")), (1, (1, 2, "two"))], "objects by rank")
    crossed = stage.sharded.hear(PerRank([listed.items[1], "word"])).result()
    require(crossed, [(0, (1, 2, "two")), (1, "word")], "chosen objects by rank")
    require(listed.items[1].result(), (1, 2, "two"), "one rank's object")
    require_raises(ProtocolError, lambda: stage.two.answer(listed))
    error = require_raises(ProtocolError, lambda: stage.three.hear(listed))
    require("three.hear has 3 ranks and got PerRank of 2 items" in str(error), True, str(error))


def check_rank_zero_sees_the_whole_batch(stage: StageWorker) -> None:
    batch = build_batch(7)
    expected = TensorDict({"centered": batch["x"] - batch["x"].mean()}, batch_size=[7])
    require_batch(stage.solo.center(stage.three.echo(batch)).result(), expected)
    require_batch(stage.two.center(stage.three.echo(batch)).result(), expected)


def check_metrics_are_sums_over_counts(stage: StageWorker) -> None:
    metrics = stage.two.count(build_batch(7)).result()
    require((metrics["row"], metrics["rows"], metrics["row_max"]), (3.0, 3.5, 6.0), "metrics")
    require(metrics["none"] != metrics["none"], True, "a metric without data is nan")
    require_raises(ProtocolError, lambda: stage.two.answer(stage.two.count(build_batch(7))))


def check_objects_come_back_and_are_passed_on(stage: StageWorker) -> None:
    answer = stage.two.answer({"text": "a"})
    require(answer.result()["value"], {"text": "a"}, "object")
    require(stage.solo.answer(value=answer).result()["value"]["scale"], 2.0, "object as argument")
    require(stage.two.where().result(), [(0, 2, "two"), (1, 2, "two")], "listed objects")


def check_equal_seeds_construct_equal_workers(stage: StageWorker) -> None:
    drawn = {group.role: group.answer(0).result()["drawn"] for group in (stage.two, stage.sharded, stage.solo)}
    require(len(set(drawn.values())), 1, f"first random numbers {drawn}")


def check_ranks_know_where_they_run(stage: StageWorker) -> None:
    for group in (stage.two, stage.sharded, stage.colocated, stage.solo):
        known = group.answer(0).result()["known"]
        require(known, ("cpu", 11, group.pool.name, group.topology.coordinate(0)), "device, seed, pool and coordinate")


def check_results_are_what_was_returned(stage: StageWorker) -> None:
    future = stage.two.lend_buffer(build_batch(4))
    stage.two.write_buffer().result()
    require(future.result()["lent"].tolist(), [0.0] * 4, "column after its worker wrote on")


def check_ranks_have_random_numbers_of_their_own(stage: StageWorker) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for count in (2, 1):
        first, second = stage.three.draw(count).result()[:2]
        require(first, second, f"{count} draws of ranks of one seed and equally many calls")
    require(torch.equal(torch.get_rng_state(), state), True, "the program's own stream is untouched")
    state_of_numpy = np.random.get_state()
    np.random.seed(7)
    found = [np.random.randn()]
    of_ranks = [stage.three.draw_normal(seed).result() for seed in (4, None, None)]
    found.append(np.random.randn())
    np.random.set_state(state_of_numpy)
    require(found, np.random.RandomState(7).randn(2).tolist(), "the program's own pair of normal numbers")
    require(of_ranks, [[each] * 3 for each in np.random.RandomState(4).randn(3).tolist()], "normal numbers of a rank")


def check_ranks_have_objects_of_their_own(stage: StageWorker) -> None:
    given: dict[str, list[int]] = {"seen": []}
    require(stage.two.append_rank(given).result(), [[0], [1]], "a list that each rank appends to")
    require(given, {"seen": []}, "the caller's own")
    earlier, later = stage.two.remember("a"), stage.two.remember("b")
    require(later.result()[0][-2:], ["a", "b"], "what a worker remembers")
    require(earlier.result()[0][-1:], ["a"], "an object after its worker changed it")
    heard = stage.two.hear(earlier).result()
    require([words[-1] for _, words in heard], ["a", "a"], "the object as an argument")


def check_calls_leave_a_span_for_each_rank(stage: StageWorker) -> None:
    stage.executor.trace.drain()
    stage.two.timed(stage.two.echo(build_batch(4))).result()
    spans = [span for span in stage.executor.trace.drain() if span.method == "timed"]
    require([(span.role, span.rank) for span in spans], [("two", 0), ("two", 1)], "spans")
    for span in spans:
        times = [span.submit_s, span.ready_s, span.fetched_s, span.computed_s, span.end_s]
        require(times, sorted(times), "order of times")
        require([sub.name for sub in span.sub_spans], ["inner"], "sub-spans")
        require(span.bytes_read > 0, True, "bytes")


def check_written_traces_have_times_and_bytes(stage: StageWorker) -> None:
    batch = build_batch(4)
    with stage.executor.trace.label(check="written"):
        stage.two.step(stage.two.echo(batch), seconds=0.05).result()
        stage.sharded.per_stage(batch.select("row")).result()
    with tempfile.TemporaryDirectory() as folder:
        stage.executor.trace.write_chrome(Path(folder, "trace.json"))
        events = json.loads(Path(folder, "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    calls = {(each["name"], each["tid"]): each for each in events if each["args"].get("check") == "written"}
    said = {key: (call["args"]["pool"], call["args"]["bytes_read"]) for key, call in calls.items()}
    # Each rank of a DP call has 2 of 4 rows; step reads x alone, 4 bytes a row. Both ranks of the one stage get all
    # 4 rows, 8 bytes each, though only the first is collected.
    steps = {("two.step", rank): ("stage-two", 2 * 4) for rank in range(2)}
    stages = {("sharded.per_stage", rank): ("stage-two", 4 * 8) for rank in range(2)}
    echoes = {key: said.get(key) for key in (("two.echo", 0), ("two.echo", 1))}
    require(said, {**steps, **stages, **echoes}, "pool and bytes of each call and rank")
    for key, call in calls.items():
        times = [call["args"][f"{part}_ms"] for part in ("queue", "fetch", "compute", "store")]
        require(min(times) >= 0.0, True, f"times of {key}: {times}")
        # The bar is fetch, compute and store; the queue lies before it. Each of the four is rounded to a microsecond.
        require(abs(sum(times[1:]) - call["dur"] / 1e3) < 0.01, True, f"times of {key}: {times}, {call['dur']} us")
        require(call["args"]["remote_bytes"], 0, f"bytes from other machines for {key}")
    require(min(calls["two.step", rank]["args"]["compute_ms"] for rank in range(2)) >= 49.0, True, "compute of a sleep")


def check_groups_on_one_pool_take_turns(stage: StageWorker) -> None:
    first = stage.two.step(build_batch(4), seconds=0.3)
    second = stage.colocated.step(build_batch(4))
    require(bool(first.result()["end"].max() <= second.result()["start"].min()), True, "the second waits for the first")
    slow = stage.two.step_on_rank_zero(build_batch(4), seconds=0.3)
    earliest = min(stage.colocated.now().result())
    require(earliest >= slow.result()["end"].max(), True, "a turn lasts until every slot is done")


def check_ranks_meet_in_collectives(stage: StageWorker) -> None:
    require(stage.two.sum_of_ranks().result(), [1.0, 1.0], "sum over two ranks")
    require(stage.three.sum_of_ranks().result(), [3.0, 3.0, 3.0], "sum over three ranks")


def check_fused_roles_share_ranks_in_other_layouts(stage: StageWorker) -> None:
    require(stage.sharded.sum_of_ranks().result(), [1.0, 1.0], "sum over the sharded role")
    require(
        stage.sharded.sum_over_skew(build_batch(3)).result(),
        {"total": sum_tokens(build_batch(3)) * 2},
        "both ranks get all",
    )


def check_colocated_groups_have_collectives_of_their_own(stage: StageWorker) -> None:
    batch = build_batch(3)
    require(stage.colocated.sum_of_ranks().result(), [1.0, 1.0], "sum over ranks")
    for group, copies in ((stage.two, 1), (stage.colocated, 2), (stage.two, 1)):
        total = {"total": sum_tokens(batch) * copies}
        require(group.sum_over_skew(batch).result(), total, f"{copies} rank(s) of {group.role} get each row")
    there_and_back = stage.two.echo(stage.colocated.echo(stage.two.echo(batch))).select(list(batch.keys()))
    require_batch(there_and_back.result(), batch)


def check_three_rows_on_two_ranks_meet_in_a_collective(stage: StageWorker) -> None:
    batch = build_batch(3, tokens=[4, 5, 6])
    require(stage.two.sum_over_skew(batch).result(), {"total": sum_tokens(batch)}, "sum over ranks")


def check_skewed_token_counts_meet_in_a_collective(stage: StageWorker) -> None:
    batch = build_batch(4, tokens=[500, 500, 5, 5])
    require(stage.two.sum_over_skew(batch).result(), {"total": sum_tokens(batch)}, "sum over ranks")


_WITHOUT_COLLECTIVES: tuple[Check, ...] = (
    check_rows_reach_the_ranks_of_their_protocol,
    check_own_protocol_keeps_the_order_of_rows,
    check_own_protocol_reaches_every_rank_with_rows,
    check_kinds_of_columns_come_back_as_they_were,
    check_rows_move_between_groups_of_other_chunks,
    check_one_rank_of_a_replica_is_collected,
    check_algebra_of_futures_is_that_of_tensordicts,
    check_batches_may_come_from_a_long_loop,
    check_rows_times_keeps_the_prompt_major_order,
    check_token_balance_does_not_reorder_rows,
    check_unknown_rows_follow_in_collected_order,
    check_only_columns_that_are_read_travel,
    *DECLARED_COLUMNS,
    check_two_batches_are_split_alike,
    check_a_method_takes_its_rows_in_pieces,
    check_listed_results_feed_all_to_all,
    check_listed_objects_feed_all_to_all,
    check_rank_zero_sees_the_whole_batch,
    check_metrics_are_sums_over_counts,
    check_objects_come_back_and_are_passed_on,
    check_equal_seeds_construct_equal_workers,
    check_ranks_know_where_they_run,
    check_results_are_what_was_returned,
    check_ranks_have_random_numbers_of_their_own,
    check_ranks_have_objects_of_their_own,
    check_what_cannot_travel_is_refused,
    check_what_cannot_be_split_is_refused,
    check_exits_end_a_call_in_one_error,
    check_writing_into_shared_rows_is_an_error,
    check_results_are_as_registered,
    check_fewer_rows_than_ranks_names_both_numbers,
    check_wrong_rows_and_columns_are_named,
    check_rows_of_different_shapes_are_refused,
    check_protocols_beyond_the_batch_are_named,
    check_exceptions_without_a_text_are_errors,
    check_wrong_columns_are_named_though_not_read,
    check_exceptions_come_back_as_they_are,
    check_failed_inputs_are_the_first_failure,
    check_futures_in_containers_are_refused,
    check_unknown_methods_name_the_known_ones,
    check_calls_leave_a_span_for_each_rank,
    check_written_traces_have_times_and_bytes,
    check_groups_on_one_pool_take_turns,
)

_WITH_COLLECTIVES: tuple[Check, ...] = (
    check_ranks_meet_in_collectives,
    check_fused_roles_share_ranks_in_other_layouts,
    check_colocated_groups_have_collectives_of_their_own,
    check_three_rows_on_two_ranks_meet_in_a_collective,
    check_skewed_token_counts_meet_in_a_collective,
)
