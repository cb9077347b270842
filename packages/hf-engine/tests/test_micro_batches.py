from __future__ import annotations

import json
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from hf_engine.models.rope import RopeLimits
from hf_engine.training import micro_batches
from hf_engine.training.batch_agreement import agree_on_micro_batches
from hf_engine.training.micro_batches import MicroBatch, PackedMicroBatch, SequenceBatch, plan_micro_batches
from hf_engine.training.shared_prompts import PromptSharing
from hf_protocols import BatchError

lengths = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), max_size=12)


@given(lengths, st.integers(40, 120), st.sampled_from([0.0, 0.01, 0.2]), st.none() | st.integers(1, 130))
def test_every_row_is_in_one_micro_batch_within_the_budget(rows, max_tokens, pair_memory, enough):
    """One row alone may keep more scores than the budget has room for, and have more tokens than are enough."""
    prompts, responses = [p for p, _ in rows], [r for _, r in rows]
    batches = plan_micro_batches(prompts, responses, max_tokens, pair_memory=pair_memory, enough_tokens=enough)
    assert sorted(row for batch in batches for row in batch) == list(range(len(rows)))
    for batch in batches:
        width = max(prompts[row] for row in batch) + max(responses[row] for row in batch)
        assert width <= max_tokens
        if len(batch) > 1:
            assert len(batch) * (width + pair_memory * width**2) <= max_tokens
            assert len(batch) * width <= (enough or max_tokens)


def test_similar_lengths_go_together():
    assert plan_micro_batches([2, 9, 2, 9], [1, 1, 1, 1], 20) == [[1, 3], [0, 2]]


@given(lengths, st.integers(40, 120), st.sets(st.integers(1, 40), min_size=1, max_size=3))
def test_rows_of_other_frequencies_are_kept_apart(rows, max_tokens, splits):
    limits = RopeLimits(splits=tuple(sorted(splits)))
    prompts, responses = [p for p, _ in rows], [r for _, r in rows]
    batches = plan_micro_batches(prompts, responses, max_tokens, rope_limits=limits)
    assert sorted(row for batch in batches for row in batch) == list(range(len(rows)))
    assert all(len({sum(sum(rows[row]) > split for split in splits) for row in batch}) == 1 for batch in batches)


def test_a_row_above_the_budget_is_named():
    with pytest.raises(BatchError, match=r"row 1 has 30 prompt \+ 5 response = 35 tokens, above micro_batch_tokens=32"):
        plan_micro_batches([2, 30], [2, 5], 32)


def agree(rows_by_rank, max_tokens):
    """Rows of each micro-batch of this rank."""
    rows = rows_by_rank[dist.get_rank()]
    columns = {"prompt_ids": jagged([[1] * length for length in rows]), "response_ids": jagged([[2]] * len(rows))}
    prepare = partial(SequenceBatch, TensorDict(columns, batch_size=[len(rows)]))
    agreed = agree_on_micro_batches(prepare, max_tokens, dist.group.WORLD, torch.device("cpu"), needs_rows=True)
    return [micro_batch.rows.tolist() for micro_batch in agreed.micro_batches]


def test_ranks_agree_on_the_largest_count_and_fill_with_dummies(ranks2):
    """Six rows of 10 tokens are three pairs of 20; the other rank's one row is one micro-batch, and two dummies."""
    assert ranks2.run(agree, [[9] * 6, [9]], 20) == [[[0, 1], [2, 3], [4, 5]], [[0], [], []]]
    assert ranks2.run(agree, [[9] * 6, [9]], 1000) == [[[0, 1, 2, 3, 4, 5]], [[0]]]


def cut(
    prompts,
    responses,
    *,
    sharing=None,
    pair_memory=0.0,
    max_tokens=100,
    enough_tokens=None,
    dtype=torch.int64,
    **more,
):
    columns = {"prompt_ids": jagged(prompts, dtype), "response_ids": jagged(responses, dtype), **more}
    sequences = SequenceBatch(TensorDict(columns, batch_size=[len(prompts)]), candidates="candidate_ids" in more)
    sequences.sharing, sequences.pair_memory = sharing, pair_memory
    return sequences.micro_batches(max_tokens, enough_tokens)


def test_models_share_the_micro_batches_of_the_same_rows():
    prompts, responses = [[1, 2], [1, 2], [3]], [[4], [5, 6], [7]]
    sharing = PromptSharing(pair_work=1e-6, pair_memory=0, always=True)
    first, *rest = cut(prompts, responses, sharing=sharing)
    again = cut(prompts, responses, sharing=sharing)
    assert isinstance(first, PackedMicroBatch)
    assert all(one is other for one, other in zip([first, *rest], again, strict=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"responses": [[4], [5, 8], [7]]},
        {"responses": [[4], [5], [6, 7]]},
        {"prompts": [[1, 2], [1, 3], [3]]},
        {"sharing": None},
        {"sharing": PromptSharing(pair_work=1e-6, pair_memory=0)},
        {"max_tokens": 90},
        {"enough_tokens": 50},
        {"pair_memory": 0.01},
        {"dtype": torch.int32},
    ],
)
def test_other_rows_or_bounds_have_micro_batches_of_their_own(changes):
    given = {
        "prompts": [[1, 2], [1, 2], [3]],
        "responses": [[4], [5, 6], [7]],
        "sharing": PromptSharing(pair_work=1e-6, pair_memory=0, always=True),
    }
    micro_batches._CUTS.clear()
    first = cut(**given)
    found = cut(**given | changes)
    assert not {id(each) for each in first} & {id(each) for each in found}
    again = cut(**given)
    assert {id(each) for each in first} == {id(each) for each in again}


def test_a_loss_may_write_into_its_mask():
    batch = TensorDict({"prompt_ids": jagged([[1], [2]]), "response_ids": jagged([[3, 4], [5]])}, batch_size=[2])
    for _ in range(2):
        sequences = SequenceBatch(batch)
        (found,) = sequences.micro_batches(100)
        mask = sequences.padded_columns(found)["response_mask"]
        assert mask.tolist() == [[True, True], [True, False]]
        mask.zero_()


def test_micro_batches_share_all_but_their_candidates():
    tokens = [[[9, 8]], [[7, 6], [5, 4]]]
    given = torch.nested.nested_tensor([torch.tensor(each) for each in tokens], layout=torch.jagged)
    (without,) = cut([[1], [2]], [[3], [4, 5]])
    found = [cut([[1], [2]], [[3], [4, 5]], candidate_ids=given + shift)[0] for shift in (0, 1)]
    assert without.candidate_ids is None and without.rows.tolist() == [1, 0]
    assert all(each.input_ids is without.input_ids for each in found)
    assert [each.candidate_ids.tolist() for each in found] == [
        [[[7, 6], [5, 4]], [[9, 8], [0, 0]]],
        [[[8, 7], [6, 5]], [[10, 9], [0, 0]]],
    ]


def test_micro_batches_of_many_tokens_are_not_kept(monkeypatch):
    rows = [[11, 12]], [[13, 14, 15]]
    monkeypatch.setattr(micro_batches, "_MOST_CUT_TOKENS", 6)  # five ids and two lengths
    assert cut(*rows)[0] is not cut(*rows)[0]
    monkeypatch.setattr(micro_batches, "_MOST_CUT_TOKENS", 7)
    assert cut(*rows)[0] is cut(*rows)[0]


def test_rows_that_were_written_again_have_other_micro_batches():
    column = jagged([[3, 4], [5, 6]])
    batch = TensorDict({"prompt_ids": jagged([[1], [2]]), "response_ids": column}, batch_size=[2])
    (before,) = SequenceBatch(batch).micro_batches(100)
    column.values().add_(1)
    (after,) = SequenceBatch(batch).micro_batches(100)
    assert before.response_ids.tolist() == [[3, 4], [5, 6]]
    assert after.response_ids.tolist() == [[4, 5], [6, 7]]


def agree_on_weights(holds_by_rank):
    prepare = partial(SequenceBatch, batch_of_three())
    holds = holds_by_rank[dist.get_rank()]
    world, device = dist.group.WORLD, torch.device("cpu")
    return agree_on_micro_batches(prepare, 100, world, device, needs_rows=True, holds_weights=holds).all_hold_weights


@pytest.mark.parametrize("holds", [[True, True], [True, False], [False, True], [False, False]], ids=str)
def test_every_rank_knows_whether_all_hold_weights(ranks1, ranks2, holds):
    assert ranks2.run(agree_on_weights, holds) == [all(holds)] * 2
    assert ranks1.run(agree_on_weights, holds) == [holds[0]]


def agree_in_replicas(batches, replicas, arguments=None):
    """Rows of each micro-batch of this rank, or the error of all ranks."""
    batch = batches[dist.get_rank()]
    given = arguments and arguments[dist.get_rank()]
    world, device = dist.group.WORLD, torch.device("cpu")
    try:
        agreed = agree_on_micro_batches(
            lambda: SequenceBatch(batch), 100, world, device, needs_rows=True, replicas=replicas, arguments=given
        )
    except BatchError as error:
        return str(error)
    return [micro_batch.rows.tolist() for micro_batch in agreed.micro_batches]


def apart(column):
    """The same rows with two strange elements after each."""
    if not column.is_nested:
        return column
    lengths = column.offsets().diff()
    values = torch.cat([torch.cat([row, row.new_full((2,), 9)]) for row in column.unbind()])
    offsets = torch.cat([lengths.new_zeros(1), (lengths + 2).cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths=lengths)


def test_ranks_of_a_replica_have_the_same_rows(ranks3):
    whole = batch_of_three()
    changed = whole.clone().update({"advantages": jagged([[0.5], [1.0, 2.0, 3.5], [4.0, 5.0]], torch.float32)})
    with_holes = TensorDict({name: apart(column) for name, column in whole.items()}, batch_size=[3])
    same = [[0, 2, 1]]
    assert ranks3.run(agree_in_replicas, [whole, with_holes, whole[:2]], [0, 0, 1]) == [same, same, [[0, 1]]]
    for other in (changed, whole[:2], whole.exclude("scores"), whole.clone().update({"scores": torch.zeros(3)})):
        message = (
            "rank 1 was given other rows than rank 0, which is in the same replica; the ranks computed nothing. Give "
            "all 2 ranks of a replica the same batch"
        )
        assert ranks3.run(agree_in_replicas, [whole, other, whole[:2]], [0, 0, 1]) == [message] * 3
    assert ranks3.run(agree_in_replicas, [whole, changed, whole], [0, 1, 2])[0] == same


@pytest.mark.parametrize("replicas", [[0, 0], [0, 1], None])
def test_all_ranks_are_given_the_same_arguments(ranks2, replicas):
    batches = [batch_of_three()] * 2
    # Functions that the ranks can import, which a test's own they cannot.
    first = {"temperature": 1, "loss_fn": partial(json.dumps, indent=1)}
    alike = {"temperature": 1.0, "loss_fn": json.dumps}
    assert ranks2.run(agree_in_replicas, batches, replicas, [first, alike]) == [[[0, 2, 1]]] * 2
    temperature, loss = (
        "rank 1 was given temperature={}, rank 0 temperature=1.0",
        "rank 1 was given loss_fn={}, rank 0 {}",
    )
    for other, differences in (
        ({"temperature": 0.5}, [temperature.format(0.5)]),
        ({"loss_fn": json.loads}, [loss.format("loads", "loss_fn=dumps")]),
        ({"loss_fn": None, "temperature": 2}, [temperature.format(2.0), loss.format(None, "loss_fn=dumps")]),
    ):
        message = (
            f"{'; '.join(differences)}; the ranks computed nothing. Give all ranks the same; the denominator is the "
            "sum over all of them"
        )
        assert ranks2.run(agree_in_replicas, batches, replicas, [first, alike | other]) == [message] * 2


def test_columns_that_no_loss_can_read_are_named():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once in a process that these are a prototype
        strided = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(3), torch.zeros(2)])
    for column, what in (
        (TensorDict({"x": torch.zeros(3)}, batch_size=[3]), "a TensorDict"),
        (strided, r"nested in layout torch\.strided"),
    ):
        batch = batch_of_three()
        batch["more"] = column
        with pytest.raises(BatchError, match=f"the column 'more' is {what}: a loss reads dense tensors"):
            SequenceBatch(batch).check_columns()


def refuse_a_column(needs_rows):
    """Returns how this rank fares with a column of rank 1 that no loss can read, and then without the column."""
    heard = []
    for has_column in (dist.get_rank() == 1, False):
        batch = batch_of_three()
        if has_column:
            batch["more"] = TensorDict({"x": torch.zeros(3)}, batch_size=[3])
        prepare = partial(SequenceBatch, batch)
        try:
            agreed = agree_on_micro_batches(prepare, 100, dist.group.WORLD, torch.device("cpu"), needs_rows=needs_rows)
            heard.append(len(agreed.micro_batches))
        except BatchError as error:
            heard.append(str(error).partition(":")[0])
    return heard


def test_a_column_that_one_rank_cannot_read_stops_all(ranks2):
    """Only a step reads it: scores of the same rows are computed."""
    assert ranks2.run(refuse_a_column, True) == [["rank 1 refused", 1], ["the column 'more' is a TensorDict", 1]]
    assert ranks2.run(refuse_a_column, False) == [[1, 1]] * 2


def jagged(rows, dtype=torch.int64):
    return torch.nested.nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def batch_of_three():
    columns = {
        "prompt_ids": jagged([[1, 2, 3], [4], [5, 6]]),
        "response_ids": jagged([[11], [12, 13, 14], [15, 16]]),
        "advantages": jagged([[0.5], [1.0, 2.0, 3.0], [4.0, 5.0]], torch.float32),
        "scores": torch.tensor([7.0, 8.0, 9.0]),
    }
    return TensorDict(columns, batch_size=[3])


def test_prompts_end_and_responses_start_at_one_column():
    (micro_batch,) = SequenceBatch(batch_of_three()).micro_batches(100)
    by_row = {int(row): index for index, row in enumerate(micro_batch.rows)}
    ids = [micro_batch.input_ids[by_row[row]].tolist() for row in range(3)]
    assert ids == [[1, 2, 3, 11, 0, 0], [0, 0, 4, 12, 13, 14], [0, 5, 6, 15, 16, 0]]
    positions = [micro_batch.position_ids[by_row[row]].tolist() for row in range(3)]
    assert positions == [[0, 1, 2, 3, 3, 3], [0, 0, 0, 1, 2, 3], [0, 0, 1, 2, 3, 3]]
    assert micro_batch.attention_mask[by_row[1]].tolist() == [False, False, True, True, True, True]
    assert micro_batch.response_mask[by_row[2]].tolist() == [True, True, False]
    predicted = micro_batch.input_ids.flatten()[micro_batch.predicting_positions + 1]
    assert predicted.tolist() == micro_batch.response_ids[micro_batch.response_mask].tolist()


def test_rows_that_may_share_prompts_end_before_the_last_column():
    (whole,) = SequenceBatch(batch_of_three()).micro_batches(100)
    sequences = SequenceBatch(batch_of_three())
    # The masks of packed rows do not fit in the budget.
    sequences.sharing = PromptSharing(pair_work=1, pair_memory=100)
    (cut,) = sequences.micro_batches(100)
    assert cut.input_ids.tolist() == whole.input_ids[:, :-1].tolist()
    assert cut.attention_mask.tolist() == whole.attention_mask[:, :-1].tolist()
    assert cut.response_ids.tolist() == whole.response_ids.tolist()
    rows, width = cut.predicting_positions // cut.input_ids.shape[1], whole.input_ids.shape[1]
    assert (cut.predicting_positions + rows).tolist() == whole.predicting_positions.tolist()
    assert int(whole.predicting_positions.max()) % width == width - 2
    assert (whole.num_saved, cut.num_saved) == (0, 1)


def test_a_row_too_long_for_a_mask_is_padded():
    prompts = [[1] * 60, *([row + 2] * length for row, length in enumerate((2, 9, 3, 8, 4, 7)))]
    columns = {"prompt_ids": jagged(prompts), "response_ids": jagged([[11, 12]] * 7)}
    sequences = SequenceBatch(TensorDict(columns, batch_size=[7]))
    sequences.sharing = PromptSharing(pair_work=1e-6, pair_memory=0.05)
    found = sequences.micro_batches(100)
    assert [sorted(each.rows.tolist()) for each in found if isinstance(each, PackedMicroBatch)] == [[1, 2, 3, 4, 5, 6]]
    (alone,) = (each for each in found if not isinstance(each, PackedMicroBatch))
    assert alone.rows.tolist() == [0]


def test_rows_of_equal_lengths_are_packed_by_their_own_prompts():
    def rows_by_pack(prompts, max_tokens=100, *, shares=True):
        columns = {"prompt_ids": jagged(prompts), "response_ids": jagged([[11, 12]] * 4)}
        sequences = SequenceBatch(TensorDict(columns, batch_size=[4]))
        sequences.sharing = PromptSharing(pair_work=1e-6, pair_memory=0, always=True) if shares else None
        found = sequences.micro_batches(max_tokens)
        return sorted(sorted(each.rows.tolist()) for each in found), sum(each.input_ids.numel() for each in found)

    a, b = [1] * 20, [2] * 20
    every = [0, 1, 2, 3]
    assert rows_by_pack([a, a, b, b]) == ([every], 44)
    assert rows_by_pack([a, b, a, b]) == ([every], 44)
    assert rows_by_pack([a, b, a, b], 30) == ([[0, 2], [1, 3]], 44)
    assert rows_by_pack([a, a, b, b], 30) == ([[0, 1], [2, 3]], 44)
    assert rows_by_pack([a, b, a, a]) == ([[0, 2, 3], [1]], 44)
    assert rows_by_pack([a, a, b, b], shares=False) == ([every], 88)
    assert rows_by_pack([a, a, b, b]) == ([every], 44)


def test_a_loss_sees_padded_columns_and_results_keep_their_order():
    sequences = SequenceBatch(batch_of_three())
    parts = []
    for micro_batch in (*sequences.micro_batches(8), MicroBatch.dummy()):
        if len(micro_batch.rows):
            columns = sequences.padded_columns(micro_batch)
            assert columns["advantages"].shape == micro_batch.response_mask.shape
            assert columns["advantages"][~micro_batch.response_mask].abs().sum() == 0
            assert torch.equal(columns["scores"] - 7.0, micro_batch.rows.float())
            assert columns["response_mask"].dtype == torch.bool
        parts.append((micro_batch, micro_batch.response_ids.float() * 10))
    assert len(parts) == 4
    assert [row.tolist() for row in sequences.jagged(parts).unbind()] == [
        [110.0],
        [120.0, 130.0, 140.0],
        [150.0, 160.0],
    ]


def test_rows_of_a_view_with_holes_are_read_where_they_lie():
    """A jagged tensor may start after the beginning of its values and have gaps."""
    values = torch.arange(20)
    column = torch.nested.nested_tensor_from_jagged(
        values, offsets=torch.tensor([2, 8, 15, 20]), lengths=torch.tensor([3, 0, 2])
    )
    batch = TensorDict({"prompt_ids": jagged([[1], [1], [1]]), "response_ids": column}, batch_size=[3])
    sequences = SequenceBatch(batch)
    (micro_batch,) = sequences.micro_batches(100)
    result = sequences.jagged([(micro_batch, micro_batch.response_ids.float())])
    assert [row.tolist() for row in result.unbind()] == [[2.0, 3.0, 4.0], [], [15.0, 16.0]]


def test_a_loss_sees_the_batchs_own_mask_with_its_holes():
    batch = batch_of_three()
    batch["response_mask"] = jagged([[1], [1, 0, 1], [0, 0]])
    sequences = SequenceBatch(batch)
    seen = {}
    for micro_batch in sequences.micro_batches(8):
        mask = sequences.padded_columns(micro_batch)["response_mask"]
        assert mask.dtype == torch.bool
        assert mask.shape == micro_batch.response_mask.shape
        seen |= {int(row): each.nonzero().flatten().tolist() for row, each in zip(micro_batch.rows, mask, strict=True)}
    assert seen == {0: [0], 1: [0, 2], 2: []}


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (jagged([[1], [1, 1], [1, 1]]), "row 1 of 'response_mask' has 2 values for 3 response tokens"),
        (torch.ones(3, 3), r"the column 'response_mask' is of shape \(3, 3\). Give it jagged"),
    ],
)
def test_a_mask_that_is_not_aligned_is_refused(mask, says):
    batch = batch_of_three()
    batch["response_mask"] = mask
    with pytest.raises(BatchError, match=says):
        SequenceBatch(batch)
