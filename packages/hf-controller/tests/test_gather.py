"""Rows of shards against the same rows of one eager batch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from hf_controller.data.algebra import Concat, Rename, Rows, Select, Union
from hf_controller.data.expressions import Leaf, ShardTable, Source
from hf_controller.data.gather import Assembly, BatchReader, Part
from hf_controller.data.results import encode_batch
from hf_controller.executors.in_process import LocalStore
from hf_controller.failures import Failure, UpstreamFailure
from hf_protocols import BatchError, RowSelection

STORE = LocalStore()


class FarStore(LocalStore):
    """Everything is on another machine."""

    def __init__(self) -> None:
        self.requests = []

    def is_far(self, origin):
        return True

    def request(self, shard, request):
        self.requests.append((shard, request))
        return super().request(shard, request)


def batch(lengths: list[int], offset: int = 0) -> TensorDict:
    rows = [torch.arange(length) + 1000 * (row + offset) for row, length in enumerate(lengths)]
    return TensorDict(
        {
            "row": torch.arange(len(lengths)) + offset,
            "wide": torch.arange(2 * len(lengths)).reshape(-1, 2) + offset,
            "half": torch.arange(len(lengths), dtype=torch.bfloat16),
            "tokens": torch.nested.nested_tensor(rows, layout=torch.jagged),
            "vectors": torch.nested.nested_tensor([row[:, None].float() * 2 for row in rows], layout=torch.jagged),
            "other": torch.nested.nested_tensor([row[::2] for row in rows], layout=torch.jagged),
        },
        batch_size=[len(lengths)],
    )


def split(whole: TensorDict, parts: list[list[int]]) -> Source:
    """Shards that hold the given rows each."""
    return Source(
        [
            encode_batch(
                whole[torch.tensor(part, dtype=torch.int64)],
                STORE,
                selection=RowSelection.from_rows(part),
                input_rows=len(whole),
            )
            for part in parts
        ]
    )


def read(tree, wanted: list[int], store: LocalStore = STORE) -> TensorDict:
    reader = BatchReader(store, 1.0)
    reader.look_up([tree])
    return reader.read(tree, RowSelection.from_rows(wanted), tree.columns(reader.extents))


def assert_equal(got: TensorDict, whole: TensorDict, wanted: list[int]) -> None:
    assert got.batch_size == (len(wanted),)
    assert set(got.keys()) == set(whole.keys())
    for name, column in got.items():
        assert column.dtype == whole[name].dtype
        rows = whole[name].unbind()
        assert all(torch.equal(one, rows[row]) for one, row in zip(column.unbind(), wanted, strict=True)), name


@st.composite
def sharded(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Tokens of each row, and a permuted split of the rows over one to four shards."""
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=40))
    rows = draw(st.permutations(range(len(lengths)))) if draw(st.booleans()) else list(range(len(lengths)))
    count = draw(st.integers(1, min(4, len(rows))))
    borders = [0, *sorted(draw(st.lists(st.integers(0, len(rows)), min_size=count - 1, max_size=count - 1))), len(rows)]
    parts = [list(rows[low:high]) for low, high in pairwise(borders)]
    return lengths, [part for part in parts if part]


@given(sharded(), st.data())
@settings(max_examples=60)
def test_any_rows_of_any_split_are_the_rows_of_the_whole(case, data):
    lengths, parts = case
    whole = batch(lengths)
    wanted = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=40))
    assert_equal(read(Leaf(split(whole, parts)), wanted), whole, wanted)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.complex128])
@pytest.mark.parametrize("parts", [[range(30)], [range(20), range(20, 30)]], ids=["one shard", "two shards"])
def test_scattered_rows_of_any_type_are_copied(dtype, parts):
    """Torch has no kernel that copies rows of some types by index."""
    in_bytes = (torch.arange(30 * dtype.itemsize) % 251).to(torch.uint8).view(30, -1)
    values = in_bytes.view(dtype).flatten()
    whole = {"flat": values, "pairs": torch.stack([values, values], 1)}
    shards = []
    for part in parts:
        columns = {name: column[part.start : part.stop] for name, column in whole.items()}
        one_token_each = torch.nested.nested_tensor_from_jagged(columns["flat"], torch.arange(len(part) + 1))
        shards.append(encode_batch(TensorDict({**columns, "tokens": one_token_each}, batch_size=[len(part)]), STORE))
    wanted = [*range(29, -1, -2), *range(0, 30, 2)]
    got = read(Leaf(Source(shards)), wanted)
    expected = in_bytes.numpy()[wanted].tolist()
    for column in (got["flat"], got["pairs"][:, 0], got["pairs"][:, 1], got["tokens"].values()):
        assert column.dtype == dtype
        assert column.contiguous().view(torch.uint8).view(30, -1).tolist() == expected


def test_neighbouring_rows_of_one_shard_are_not_copied():
    whole = batch([2, 3, 1, 4])
    source = split(whole, [[0, 1, 2], [3]])
    tree = Leaf(source)
    (stored,) = STORE.get([source.shards[0].arrays], 1.0)
    columns = source.shards[0].columns
    got = read(tree, [1, 2])
    assert got["row"].data_ptr() == stored[columns["row"].position].ctypes.data + 8
    assert got["tokens"].values().data_ptr() == stored[columns["tokens"].position].ctypes.data + 2 * 8


@given(sharded(), st.data())
@settings(max_examples=40)
def test_far_rows_are_the_same_rows(case, data):
    lengths, parts = case
    whole = batch(lengths)
    wanted = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=40))
    assert_equal(read(Leaf(split(whole, parts)), wanted, FarStore()), whole, wanted)


def test_remote_shards_send_only_what_is_read_and_each_row_once():
    store = FarStore()
    reader = BatchReader(store, 1.0)
    tree = Select(Leaf(split(batch([4, 3, 2, 1]), [[0, 1], [2, 3]])), ("row", "tokens"))
    reader.look_up([tree])
    got = reader.read(tree, RowSelection.from_rows([1, 1, 0, 3]), ["row", "tokens"])
    assert got["row"].tolist() == [1, 1, 0, 3]
    assert len(store.requests) == 2
    assert [request.rows for _, request in store.requests] == [RowSelection.range(0, 2), RowSelection.range(1, 2)]
    assert reader.remote_bytes == 3 * 8 + (4 + 3 + 1) * 8
    assert reader.row_weights(tree, 4) == [4, 3, 2, 1]
    assert reader.remote_bytes == 3 * 8 + (4 + 3 + 1) * 8


def test_a_far_shard_that_is_read_as_a_whole_moves_in_one_piece():
    store = FarStore()
    reader = BatchReader(store, 1.0)
    tree = Leaf(split(batch([2, 3]), [[0, 1]]))
    reader.look_up([tree])
    reader.read(tree, RowSelection.range(0, 2), tree.columns(reader.extents))
    assert store.requests == []
    assert reader.remote_bytes == tree.source.shards[0].num_bytes


@given(sharded(), st.data())
@settings(max_examples=40)
def test_pieces_follow_one_another_and_are_views(case, data):
    lengths, parts = case
    whole = batch(lengths)
    wanted = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=20))
    tree = Union(Leaf(split(whole, parts)), Select(Leaf(split(whole, [list(range(len(lengths)))])), ("row",)))
    reader = BatchReader(STORE, 1.0)
    reader.look_up([tree])
    pieces = reader.read_pieces(tree, RowSelection.from_rows(wanted), tree.columns(reader.extents))
    assert_equal(torch.cat(pieces), whole, wanted)
    stored = [array for source in tree.sources() for s in source.shards for array in STORE.get([s.arrays], 1.0)[0]]
    memory = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in stored]
    for piece in pieces:
        for values in (piece["wide"], piece["tokens"].values()):
            assert not values.numel() or any(low <= values.data_ptr() < high for low, high in memory)


def test_columns_of_several_sources_stand_side_by_side():
    left, right = batch([1, 2, 3]), batch([3, 2, 1], offset=10)
    tree = Union(
        Select(Leaf(split(left, [[0, 1], [2]])), ("row",)),
        Rename(Select(Leaf(split(right, [[2, 0, 1]])), ("tokens", "row")), (("row", "right"),)),
    )
    got = read(tree, [2, 0])
    assert got["row"].tolist() == [2, 0]
    assert got["right"].tolist() == [12, 10]
    assert [row.tolist() for row in got["tokens"].unbind()] == [[12000], [10000, 10001, 10002]]


def test_one_column_may_come_from_two_columns_of_one_shard():
    source = split(batch([1, 1]), [[0, 1]])
    renamed = Rename(Select(Leaf(source), ("wide",)), (("wide", "x"),))
    double = Rename(Select(Leaf(source), ("wide",)), (("wide", "x"),))
    got = read(Concat((Rows(renamed, RowSelection.from_rows([1])), double)), [0, 1, 2])
    assert got["x"].tolist() == [[2, 3], [0, 1], [2, 3]]


def test_no_rows_are_an_empty_batch_of_the_same_kind():
    whole = batch([1, 2])
    got = read(Leaf(split(whole, [[0], [1]])), [])
    assert got.batch_size == (0,)
    assert {name: column.dtype for name, column in got.items()} == {name: c.dtype for name, c in whole.items()}


@pytest.mark.parametrize("store", [STORE, FarStore()], ids=["near", "far"])
@pytest.mark.parametrize("lengths", [[], [0, 0], [2, 0, 3]])
@pytest.mark.parametrize("order", [1, -1], ids=["in order", "permuted"])
def test_all_rows_of_one_shard_are_the_whole(lengths, order, store):
    whole = batch(lengths) if lengths else batch([1])[:0]
    rows = list(range(len(lengths)))
    tree = Leaf(split(whole, [rows[::order]]))
    reader = BatchReader(store, 1.0)
    reader.look_up([tree])
    reader.read(tree, RowSelection.from_rows(rows[::order]), ("row",))
    assert "_index" not in vars(reader._tables[tree.source])  # which takes longer than the read
    for wanted in (rows, rows[::-1]):
        for columns in (tuple(whole.keys()), ("row", "tokens", "vectors")):
            found = reader.read(tree, RowSelection.from_rows(wanted), columns)
            assert_equal(found, whole.select(*columns), wanted)
            assert found["vectors"].offsets() is found["tokens"].offsets()


def test_bytes_are_counted_for_the_rows_that_are_read():
    reader = BatchReader(STORE, 1.0)
    tree = Leaf(split(batch([2, 3]), [[0, 1]]))
    reader.look_up([tree])
    reader.read(tree, RowSelection.range(1, 2), ["row", "tokens"])
    assert reader.bytes_read == 8 + 3 * 8


def test_weights_are_tokens_with_equal_lengths_counted_once():
    reader = BatchReader(STORE, 1.0)
    tree = Leaf(split(batch([4, 0, 3]), [[2, 0], [1]]))
    reader.look_up([tree])
    assert reader.row_weights(tree, 3) == [4 + 2, 0, 3 + 2]  # tokens and vectors agree; other has every second one
    assert reader.row_weights(Select(tree, ("row",)), 3) is None
    answers = Leaf(split(batch([4, 0, 3]), [[0, 1], [2]]))  # of another call
    scores = Rename(Select(answers, ("tokens",)), (("tokens", "scores"),))
    joined = Union(Select(tree, ("row", "tokens", "other")), scores)
    reader.look_up([joined])
    assert reader.row_weights(joined, 3) == [4 + 2, 0, 3 + 2]


def test_results_that_are_copies_follow_one_another():
    whole = batch([1, 2])
    everything = RowSelection.range(0, 2)
    table = ShardTable([encode_batch(whole, STORE, selection=everything, input_rows=2) for _ in range(3)], "actor.m")
    assert table.extent.num_rows == 6
    assert table.held == {0: RowSelection.range(0, 2), 1: RowSelection.range(2, 4), 2: RowSelection.range(4, 6)}


def test_shards_that_disagree_are_refused():
    with pytest.raises(BatchError, match=r"the ranks of actor\.m returned different columns"):
        ShardTable([encode_batch(batch([1]), STORE), encode_batch(batch([1]).select("row"), STORE)], "actor.m")
    one, two = RowSelection.from_rows([0]), RowSelection.from_rows([1])
    shards = [
        encode_batch(batch([1, 1]), STORE, selection=one, input_rows=2),
        encode_batch(batch([1, 1, 1, 1]), STORE, selection=two, input_rows=2),
    ]
    with pytest.raises(BatchError, match=r"^actor.m .* \(1 -> 2, 1 -> 4\). Register it with rows='unknown'"):
        ShardTable(shards, "actor.m")


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (torch.tensor([1], dtype=torch.int32), torch.tensor([2**31]), r"'x' is int32 \[rows\] and int64 \[rows\]"),
        (torch.ones(1), torch.ones(1, dtype=torch.float64), r"float32 \[rows\] and float64 \[rows\]"),
        (torch.ones(1, 2), torch.ones(1, 3), r"float32 \[rows, 2\] and float32 \[rows, 3\]"),
        (
            torch.ones(1, 3),
            torch.nested.nested_tensor([torch.ones(3)], layout=torch.jagged),
            r"float32 \[rows, 3\] and float32 \[rows, tokens\]",
        ),
    ],
)
def test_columns_of_different_kinds_are_never_joined(first, second, message):
    shards = [encode_batch(TensorDict({"x": column}, batch_size=[1]), STORE) for column in (first, second)]
    with pytest.raises(BatchError, match=f"{message} in the results of the ranks of actor.m"):
        ShardTable(shards, "actor.m")
    sides = [Source([shard], maker=maker) for shard, maker in zip(shards, ("actor.m", "critic.n"), strict=True)]
    expression = Concat((Leaf(sides[0]), Leaf(sides[1])))
    reader = BatchReader(STORE, 1.0)
    reader.look_up([expression])
    with pytest.raises(BatchError, match=f"{message} in the parts that concat joins, from actor.m, critic.n"):
        reader.read(expression, RowSelection.range(0, 2), ["x"])


def test_a_rank_without_rows_may_have_any_kind():
    shards = [
        encode_batch(TensorDict({"x": column}, batch_size=[len(column)]), STORE)
        for column in (torch.tensor([]), torch.tensor([7]))
    ]
    reader = BatchReader(STORE, 1.0)
    leaf = Leaf(Source(shards))
    reader.look_up([leaf])
    assert reader.read(leaf, RowSelection.range(0, 1), ["x"])["x"].tolist() == [7]


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [3, 0, 2, 1]])
def test_jagged_columns_of_equal_lengths_can_be_added_and_padded(rows):
    whole = batch([3, 1, 2, 1])
    source, other = split(whole, [[0, 1], [2, 3]]), split(whole, [[0], [1, 2, 3]])
    expression = Union(Leaf(source), Rename(Select(Leaf(other), ("tokens",)), (("tokens", "again"),)))
    reader = BatchReader(STORE, 1.0)
    reader.look_up([expression])
    chosen = RowSelection.from_rows(rows)
    found = reader.read(expression, chosen, ["tokens", "again", "vectors", "other"])
    assert torch.equal((found["tokens"] + found["again"]).values(), 2 * found["tokens"].values())
    assert found["vectors"].offsets() is found["tokens"].offsets()
    assert found["tokens"].to_padded_tensor(0).shape == (4, 3)
    for piece in reader.read_pieces(expression, chosen, ["tokens", "again"]):
        assert torch.equal((piece["tokens"] - piece["again"]).values(), torch.zeros(len(piece["tokens"].values())))
        assert piece["tokens"].to_padded_tensor(0).shape[1] == int(piece["tokens"].offsets().diff().max())


def test_a_failed_source_is_passed_on():
    failure = Failure.of(ValueError("lost"), role="actor", method="m", rank=1)
    reader = BatchReader(STORE, 1.0)
    with pytest.raises(UpstreamFailure) as error:
        reader.look_up([Leaf(Source([STORE.hold(failure)]))])
    assert error.value.failure is failure


def test_writing_in_place_is_seen():
    reader = BatchReader(STORE, 1.0)
    tree = Leaf(split(batch([2, 3]), [[0, 1]]))
    reader.look_up([tree])
    got = reader.read(tree, RowSelection.range(0, 2), ["row", "tokens", "wide"])
    assert reader.written_columns() == []
    got["row"][0] = 5
    got["tokens"].values().mul_(2)
    assert reader.written_columns() == ["row", "tokens"]


def test_a_column_of_many_megabytes_is_joined_like_a_small_one():
    halves = [torch.arange(2**20).view(-1, 4) + offset for offset in (0, 1)]  # 8 MiB each
    for kind in (torch.int64, torch.bfloat16):
        arrays = [half.to(kind) for half in halves]
        parts = [Part(0, RowSelection.range(1, 2**18)), Part(1, RowSelection.range(0, 2**18))]
        assert torch.equal(Assembly(parts).build_dense(arrays), torch.cat([arrays[0][1:], arrays[1]]))
        every = [Part(array, RowSelection.from_rows(range(0, 2**18, 2**17 // 16))) for array in (1, 0)]
        assert torch.equal(Assembly(every).build_dense(arrays), torch.cat([a[:: 2**17 // 16] for a in arrays[::-1]]))
