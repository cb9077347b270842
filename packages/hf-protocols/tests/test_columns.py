from __future__ import annotations

import pytest

from hf_protocols import Dataflow
from hf_protocols.columns import ColumnSize, find_column_size

PER_ROW = ColumnSize(row_bytes=8)
IDS, MASK, FLOATS = (ColumnSize(response_token_bytes=num_bytes) for num_bytes in (8, 1, 4))


@pytest.mark.parametrize(
    ("size", "names"),
    [
        (PER_ROW, ("row_id", "answer", "finish_reason", "weight_version", "scores", "baseline_scores", "costs")),
        (ColumnSize(), ("sample_id", "prompt_id", "group_id", "sample_id_2")),
        (ColumnSize(prompt_token_bytes=8), ("prompt_ids", "prompt_ids?")),
        (IDS, ("response_ids", "response_ids_2", "response_ids_2?")),
        (MASK, ("response_mask", "response_mask_2")),
        (FLOATS, ("old_logprobs", "rollout_logprobs_2", "values", "advantages", "a_column_of_a_user")),
    ],
)
def test_names_have_their_sizes(size: ColumnSize, names: tuple[str, ...]) -> None:
    assert {find_column_size(name) for name in names} == {size}


def test_a_row_has_the_bytes_of_its_lengths() -> None:
    size = ColumnSize(row_bytes=1, prompt_token_bytes=20, response_token_bytes=300)
    assert size.count_bytes(prompt_tokens=2, response_tokens=3) == 1 + 40 + 900


def test_optional_columns_have_the_sizes_of_required_ones() -> None:
    names = {name for call in Dataflow.preset("ppo").calls for name in (*call.reads, *call.writes)}
    assert all(find_column_size(f"{name}?") == find_column_size(name) for name in names)
