"""A supervised term in the step of another loss has its own mean, and leaves the other's as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from hf_algorithms.jagged import pad_rows, to_jagged
from hf_algorithms.losses import Aggregation, PolicyLoss
from hf_algorithms.workers._pretraining import join_pretraining


def jagged(*rows: list[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return to_jagged([torch.tensor(row, dtype=dtype) for row in rows])


def batches() -> tuple[TensorDict, TensorDict]:
    mask = {"dtype": torch.bool}
    policy = {
        "prompt_ids": jagged([1], [2, 3], dtype=torch.int64),
        "response_ids": jagged([1, 2, 3], [4, 5], dtype=torch.int64),
        "response_mask": jagged([1, 0, 1], [1, 1], **mask),
        "advantages": jagged([1.0, 9.0, -0.5], [0.25, 2.0]),
        "old_logprobs": jagged([-1.0, -1.0, -2.0], [-0.5, -1.5]),
        "finish_reason": torch.tensor([0, 1]),
    }
    learned = {
        "prompt_ids": jagged([7], dtype=torch.int64),
        "response_ids": jagged([6, 7], dtype=torch.int64),
        "response_mask": jagged([1, 1], **mask),
    }
    return TensorDict(policy, batch_size=[2]), TensorDict(learned, batch_size=[1])


def test_the_sum_is_both_losses_each_by_its_own_denominator() -> None:
    policy, learned = batches()
    loss = PolicyLoss()
    count, tokens, coefficient = 4.0, 2.0, 0.3
    joined, both = join_pretraining(policy, loss, learned, weight=coefficient * count / tokens)
    assert joined.batch_size == torch.Size([3])
    assert [row.tolist() for row in joined["response_ids"].unbind()] == [[1, 2, 3], [4, 5], [6, 7]]
    assert joined["finish_reason"].tolist() == [0, 1, 0]

    torch.manual_seed(0)
    logprobs = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    padded: dict[str, Any] = {str(name): pad_rows(joined[name]) for name, _ in joined.items()}
    total, metrics = both({"logprobs": logprobs}, padded)
    (found,) = torch.autograd.grad(total / count, logprobs)

    alone = {str(name): pad_rows(policy[name]) for name, _ in policy.items()}
    policy_loss, _ = loss({"logprobs": logprobs[:2]}, alone)
    reference = policy_loss / count - coefficient * logprobs[2, :2].mean()
    (wanted,) = torch.autograd.grad(reference, logprobs)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(total / count, reference, rtol=0, atol=1e-12)
    assert metrics["ptx_loss"] == (float(-logprobs.detach()[2, :2].sum()), 2.0)


def test_metrics_of_the_policy_do_not_count_rows_to_learn() -> None:
    policy, learned = batches()
    loss = PolicyLoss(aggregation=Aggregation(mode="constant", constant=5.0))
    joined, both = join_pretraining(policy, loss, learned, weight=0.5)
    logprobs = torch.zeros(3, 3, dtype=torch.float64)
    padded: dict[str, Any] = {str(name): pad_rows(joined[name]) for name, _ in joined.items()}
    alone = {str(name): pad_rows(policy[name]) for name, _ in policy.items()}
    _, wanted = loss({"logprobs": logprobs[:2]}, alone)
    found = both({"logprobs": logprobs}, padded)[1]
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize("rows", [[0, 1], [2], [0, 2]])
def test_a_micro_batch_may_have_rows_of_one_kind(rows: list[int]) -> None:
    policy, learned = batches()
    joined, both = join_pretraining(policy, PolicyLoss(), learned, weight=0.5)
    torch.manual_seed(1)
    logprobs = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    padded: dict[str, Any] = {str(name): pad_rows(joined[name]) for name, _ in joined.items()}
    (whole,) = torch.autograd.grad(both({"logprobs": logprobs}, padded)[0], logprobs)
    part = {name: column[rows] for name, column in padded.items()}
    (found,) = torch.autograd.grad(both({"logprobs": logprobs[rows]}, part)[0], logprobs)
    torch.testing.assert_close(found[rows], whole[rows], rtol=0, atol=1e-12)
