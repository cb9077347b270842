from __future__ import annotations

import torch

from hf_algorithms.jagged import decode_text, encode_text, list_rows, pad_rows, to_jagged, unpad_rows


def test_padding_and_back_keeps_every_row() -> None:
    rows = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0]), torch.tensor([5.0, 6.0])]
    column = to_jagged(rows)
    padded = pad_rows(column)
    assert padded.tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0]]
    back = unpad_rows(padded * 2, column)
    assert [row.tolist() for row in back.unbind()] == [[2, 4, 6], [8], [10, 12]]


def test_padding_leaves_out_what_lies_between_rows() -> None:
    """Of a narrowed column rows have holes between them, and the flat values begin before the first row."""
    values = torch.arange(12)
    column = torch.nested.nested_tensor_from_jagged(
        values, torch.tensor([2, 5, 9, 12]), lengths=torch.tensor([2, 0, 3])
    )
    padded = pad_rows(column)
    assert padded.tolist() == [[2, 3, 0], [0, 0, 0], [9, 10, 11]]
    assert [row.tolist() for row in unpad_rows(padded + 1, column).unbind()] == [[3, 4], [], [10, 11, 12]]


def test_padding_takes_tokens_of_several_numbers() -> None:
    column = to_jagged([torch.ones(2, 3), torch.ones(1, 3)])
    assert torch.equal(pad_rows(column), torch.tensor([[1.0, 1.0], [1.0, 0.0]])[..., None].expand(2, 2, 3))


def test_rows_are_cut_to_the_width_of_what_is_unpadded() -> None:
    like = to_jagged([torch.zeros(3, dtype=torch.bool), torch.zeros(1, dtype=torch.bool)])
    assert [row.tolist() for row in unpad_rows(torch.ones(2, 2), like).unbind()] == [[1, 1], [1]]


def test_a_dense_column_is_left_alone() -> None:
    column = torch.arange(3)
    assert pad_rows(column) is column


def test_texts_come_back_from_their_bytes() -> None:
    texts = ["122", "", "zw\u00f6lf \u20ac"]
    by_hand = to_jagged([torch.tensor(list(text.encode()), dtype=torch.uint8) for text in texts])
    column = encode_text(texts)
    assert column.dtype == torch.uint8
    assert [row.tolist() for row in column.unbind()] == [row.tolist() for row in by_hand.unbind()]
    assert decode_text(by_hand) == decode_text(column) == decode_text(column.long()) == texts
    assert decode_text(encode_text(["", ""])) == ["", ""]


def test_texts_are_read_wherever_their_bytes_stand() -> None:
    values = torch.tensor(list(b"ab-cd-"), dtype=torch.uint8)
    column = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 3, 6]), torch.tensor([2, 2]))
    assert decode_text(column) == ["ab", "cd"]


def test_rows_are_listed_wherever_their_values_stand() -> None:
    column = torch.nested.nested_tensor_from_jagged(torch.arange(9), torch.tensor([0, 3, 3, 9]))
    narrowed = torch.nested.nested_tensor_from_jagged(torch.arange(9), torch.tensor([0, 4, 8]), torch.tensor([2, 1]))
    assert list_rows(column) == [[0, 1, 2], [], [3, 4, 5, 6, 7, 8]]
    assert list_rows(narrowed) == [[0, 1], [4]]


def test_rows_are_cut_to_a_dense_column():
    padded = torch.arange(8.0).view(2, 4)
    assert [row.tolist() for row in unpad_rows(padded, torch.zeros(2, 3)).unbind()] == [[0, 1, 2], [4, 5, 6]]
    assert [row.tolist() for row in unpad_rows(padded, torch.zeros(2, 9)).unbind()] == padded.tolist()
