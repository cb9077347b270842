from __future__ import annotations

import pytest
import torch

from hf_engine.resharding.checking import _check_names
from hf_engine.resharding.layouts import fsdp_layout, replicated_layout
from hf_engine.resharding.tensor_checks import check_readable, check_weights, check_writable
from hf_protocols.errors import ReshardError

SHAPES = {f"layer.{index}.weight": (4, 2) for index in range(26)}


def tensors(dtype: torch.dtype = torch.float32, rows: int = 2) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(rows, 2, dtype=dtype) for name in SHAPES}


@pytest.mark.parametrize(("built", "given"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16")])
def test_tensors_of_one_other_dtype_are_one_line(built, given):
    layout = fsdp_layout(SHAPES, range(2), dtype=built)
    with pytest.raises(ReshardError) as refused:
        check_weights(layout, 0, tensors(getattr(torch, given)), "source")
    assert str(refused.value) == (
        f"the source tensors of rank 0 do not match the layout: all 26 are {given}, but the layout was built for "
        f"{built}. Pass dtype='{given}' to the function that built it, such as fsdp_layout(), or convert the tensors"
    )
    check_weights(fsdp_layout(SHAPES, range(2), dtype=given), 0, tensors(getattr(torch, given)), "source")


def test_other_faults_are_named_in_addition_to_the_dtype():
    weights = tensors(torch.bfloat16) | {"layer.3.weight": torch.zeros(3, 2, dtype=torch.bfloat16)}
    with pytest.raises(ReshardError, match=r"all 26 are bfloat16.*'layer.3.weight' has shapes") as refused:
        check_weights(fsdp_layout(SHAPES, range(2)), 0, weights, "source")
    assert "has dtypes" not in str(refused.value)


def test_one_tensor_of_another_dtype_is_named():
    weights = tensors() | {"layer.3.weight": torch.zeros(2, 2, dtype=torch.bfloat16)}
    with pytest.raises(ReshardError, match=r"'layer.3.weight' has dtypes \['bfloat16'\], the layout says float32$"):
        check_weights(fsdp_layout(SHAPES, range(2)), 0, weights, "source")


@pytest.mark.parametrize(
    ("weights", "part"),
    [
        ({}, "missing ['layer.0.weight', 'layer.1.weight', 'layer.10.weight', and 23 more]"),
        (tensors(rows=3), "'layer.2.weight' has shapes [(3, 2)], the layout says [(2, 2)]; and 23 more"),
        (
            tensors() | {f"x{index:02}": torch.zeros(1) for index in range(30)},
            "extra ['x00', 'x01', 'x02', and 27 more]",
        ),
    ],
    ids=["missing", "shapes", "extra"],
)
def test_many_faults_of_one_kind_are_summed_up(weights, part):
    with pytest.raises(ReshardError) as refused:
        check_weights(fsdp_layout(SHAPES, range(2)), 0, weights, "source")
    assert part in str(refused.value)
    assert len(str(refused.value)) < 500


def test_checks_of_files_and_memory_are_summed_up_as_well():
    with pytest.raises(ReshardError, match=r"missing \['layer.0.weight', .*, and 23 more\]$"):
        _check_names({}, SHAPES)
    with pytest.raises(ReshardError, match=r"has shape \(1,\), the layout says \(4, 2\); and 23 more$"):
        _check_names(dict.fromkeys(SHAPES, (1,)), SHAPES)
    with pytest.raises(ReshardError, match=r"is on the meta device.*; and 23 more$"):
        check_readable({name: [torch.zeros(1, device="meta")] for name in SHAPES}, "the tensors")


def test_a_replicated_layout_names_the_same_argument():
    layout = replicated_layout({"a": (2,)}, [0])
    with pytest.raises(ReshardError, match=r"all 1 are bfloat16, .*. Pass dtype='bfloat16' to the function"):
        check_weights(layout, 0, {"a": torch.zeros(2, dtype=torch.bfloat16)}, "target")


def test_columns_of_one_matrix_share_no_element():
    whole = torch.zeros(6, 8)
    check_writable({"a": [whole[:, :3]], "b": [whole[:, 3:]]}, "the tensors")
    check_writable({"a": [whole[::2]], "b": [whole[1::2, 2:]], "c": [whole[1::2, :2]]}, "the tensors")
    check_writable({"a": [whole[:, 7]], "b": [whole[2:3, :7]], "c": [whole[4:5, :7]]}, "the tensors")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda w: {"a": [w[:, :4]], "b": [w[:, 3:]]}, "'b' shares memory with 'a' and needs its own"),
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
