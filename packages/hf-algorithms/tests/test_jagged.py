from __future__ import annotations

import torch

from hf_algorithms.jagged import decode_text, pad_rows, to_jagged, unpad_rows


def test_padding_and_back_keeps_every_row() -> None:
    rows = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0]), torch.tensor([5.0, 6.0])]
    column = to_jagged(rows)
    padded = pad_rows(column)
    assert padded.tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0]]
    back = unpad_rows(padded * 2, column)
    assert [row.tolist() for row in back.unbind()] == [[2, 4, 6], [8], [10, 12]]


def test_a_dense_column_is_left_alone() -> None:
    column = torch.arange(3)
    assert pad_rows(column) is column


def test_texts_come_back_from_their_bytes() -> None:
    texts = ["122", "", "zw\u00f6lf \u20ac"]
    column = to_jagged([torch.tensor(list(text.encode()), dtype=torch.uint8) for text in texts])
    assert decode_text(column) == texts
