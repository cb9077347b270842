"""Target tensors that hold elements of other ones."""

from __future__ import annotations

import pytest
import torch

from hf_engine.resharding.usable import check_writable
from hf_protocols.errors import ReshardError


def test_columns_of_one_matrix_share_no_element():
    whole = torch.zeros(6, 8)
    check_writable({"a": [whole[:, :3]], "b": [whole[:, 3:]]}, "the tensors")
    check_writable({"a": [whole[::2]], "b": [whole[1::2, 2:]], "c": [whole[1::2, :2]]}, "the tensors")
    check_writable({"a": [whole[:, 7]], "b": [whole[2:3, :7]], "c": [whole[4:5, :7]]}, "the tensors")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda w: {"a": [w[:, :4]], "b": [w[:, 3:]]}, "'b' shares memory with 'a': give each its own"),
        (lambda w: {"a": [w[:, 7]], "b": [w[2:4]]}, "'b' shares memory with 'a'"),
        (lambda w: {"a": [w[0]], "b": [w[:2, 7]], "c": [w[5]]}, "'b' shares memory with 'a'"),
        (lambda w: {"a": [w[::2]], "b": [w.t()[1]]}, "'b' shares memory with 'a'"),
        (lambda w: {"a": [w[:, :4]], "b": [w.view(torch.int16)[:, 7:]]}, "'b' shares memory with 'a'"),
        (lambda w: {"a": [w[:3]], "b": [w[2:]]}, "'b' shares memory with 'a'"),
        (lambda w: {"a": [w[:, :2], w[:, 1:3]]}, "'a' shares memory with 'a'"),
    ],
)
def test_tensors_that_share_an_element_are_refused(make, message):
    with pytest.raises(ReshardError, match=f"the tensors cannot be used: {message}"):
        check_writable(make(torch.zeros(6, 8)), "the tensors")
