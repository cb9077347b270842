"""The reverse KL over the teacher's likeliest tokens and the rest, against numpy, token by token."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from hf_algorithms.losses import Aggregation, DistillationLoss

B, T, V = 3, 4, 7
MASK = torch.tensor([[True, True, False, True], [True, False, False, False], [False, False, False, False]])


def distributions(seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(B, T, V, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 2


def build(student: torch.Tensor, teacher: torch.Tensor, k: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Outputs of the student, with the gradient of its logits, and the batch."""
    top = torch.log_softmax(teacher, -1).topk(k)
    logprobs = torch.log_softmax(student, -1)
    outputs = {
        "candidate_logprobs": logprobs.gather(-1, top.indices),
        "entropy": -(logprobs.exp() * logprobs).sum(-1),
    }
    batch = {"response_mask": MASK, "candidate_ids": top.indices, "teacher_candidate_logprobs": top.values}
    return outputs, batch


def compute_lumped_kl(student: np.ndarray, teacher: np.ndarray, k: int) -> float:
    """KL(student || teacher) of one position, the tokens outside of the teacher's k likeliest as one."""
    p, q = (np.exp(each) / np.exp(each).sum() for each in (student, teacher))
    likeliest = np.argsort(-q)[:k]
    p, q = (np.append(each[likeliest], each.sum() - each[likeliest].sum()) for each in (p, q))
    return float((p * np.log(p / q)).sum())


@pytest.mark.parametrize("k", [1, 2, 4, V - 1])
def test_the_loss_is_the_divergence_with_the_rest_as_one(k: int) -> None:
    student, teacher = distributions(0), distributions(1)
    loss, metrics = DistillationLoss()(*build(student, teacher, k))
    wanted = [
        compute_lumped_kl(student[row, token].numpy(), teacher[row, token].numpy(), k)
        for row, token in MASK.nonzero().tolist()
    ]
    np.testing.assert_allclose(float(loss), sum(wanted), rtol=1e-10)
    np.testing.assert_allclose(metrics["distillation/kl"], (sum(wanted), 4.0), rtol=1e-10)
    mass = torch.softmax(teacher, -1).topk(k).values.sum(-1)[MASK]
    np.testing.assert_allclose(metrics["distillation/rest"], ((1 - mass).sum(), 4.0), rtol=1e-10)
    entropies = torch.distributions.Categorical(logits=student).entropy()[MASK]
    np.testing.assert_allclose(metrics["entropy"], (entropies.sum(), 4.0), rtol=1e-10)


def test_all_tokens_but_one_give_the_whole_divergence() -> None:
    student, teacher = distributions(0), distributions(1)
    p, q = torch.log_softmax(student, -1), torch.log_softmax(teacher, -1)
    whole = (p.exp() * (p - q)).sum(-1)[MASK]
    lumped = [float(DistillationLoss()(*build(student, teacher, k))[0]) for k in range(1, V)]
    assert lumped == sorted(lumped)  # distinguishing more tokens never lowers it
    np.testing.assert_allclose(lumped[-1], float(whole.sum()), rtol=1e-10)
    single = build(student.float(), teacher.float(), V - 1)
    # The last probability is 1 less all others, which float32 gives to 1e-7.
    np.testing.assert_allclose(float(DistillationLoss()(*single)[0]), float(whole.sum()), rtol=1e-4)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_the_gradient_is_that_of_finite_differences(mode: Any) -> None:
    loss, teacher = DistillationLoss(aggregation=Aggregation(mode=mode)), distributions(1)
    student = distributions(0).requires_grad_()
    assert torch.autograd.gradcheck(lambda each: loss(*build(each, teacher, 3))[0], student)


def test_the_gradient_ends_at_the_teacher() -> None:
    student = distributions(0).requires_grad_()
    loss, _ = DistillationLoss()(*build(student, distributions(0), 3))
    (gradient,) = torch.autograd.grad(loss, student)
    np.testing.assert_allclose(gradient, 0.0, atol=1e-14)


def test_tokens_without_a_mask_change_nothing() -> None:
    outputs, batch = build(distributions(0), distributions(1), 3)
    found = []
    for filler in (0.0, torch.nan, torch.inf, -torch.inf):
        given = {
            name: each.clone().masked_fill(~MASK[..., None] if each.dim() == 3 else ~MASK, filler).requires_grad_()
            for name, each in outputs.items()
        }
        teacher = batch["teacher_candidate_logprobs"].masked_fill(~MASK[..., None], filler)
        loss, metrics = DistillationLoss()(given, batch | {"teacher_candidate_logprobs": teacher})
        loss.backward()
        gradient = given["candidate_logprobs"].grad
        assert gradient is not None
        assert not gradient[~MASK].any()
        found.append((float(loss.detach()), metrics, gradient.tolist()))
    assert all(each == found[0] for each in found[1:])


def test_micro_batches_add_up_to_the_batch() -> None:
    outputs, batch = build(distributions(0), distributions(1), 3)
    for mode in ("token-mean", "seq-mean-token-mean"):
        loss = DistillationLoss(aggregation=Aggregation(mode=mode))  # type: ignore[arg-type]
        whole, metrics = loss(outputs, batch)
        parts = [
            loss({k: v[rows] for k, v in outputs.items()}, {k: v[rows] for k, v in batch.items()})
            for rows in ([2, 0], [1])
        ]
        torch.testing.assert_close(parts[0][0] + parts[1][0], whole)
        assert loss.count({k: v[[2, 0]] for k, v in batch.items()}) + loss.count(
            {k: v[[1]] for k, v in batch.items()}
        ) == loss.count(batch)
        for name, (total, count) in metrics.items():
            np.testing.assert_allclose(np.sum([each[name] for _, each in parts], axis=0), (total, count))


def test_a_token_that_the_student_lacks_adds_nothing() -> None:
    """The teacher's embedding may have more rows: the student gives these ids probability 0."""
    outputs, batch = build(distributions(0), distributions(1), 3)
    student = outputs["candidate_logprobs"].clone()
    student[..., -1] = -torch.inf
    student.requires_grad_()
    loss, _ = DistillationLoss()({"candidate_logprobs": student}, batch)
    loss.backward()
    assert student.grad is not None
    assert student.grad.isfinite().all()
    assert not student.grad[..., -1].any()
    wanted = 0.0
    for row, token in MASK.nonzero().tolist():
        p = np.exp(student.detach()[row, token, :2].numpy())
        q = np.exp(batch["teacher_candidate_logprobs"][row, token].numpy())
        p, q = np.append(p, 1 - p.sum()), np.append(q[:2], 1 - q.sum())
        wanted += (p * np.log(p / q)).sum()
    np.testing.assert_allclose(float(loss.detach()), wanted, rtol=1e-10)


def test_a_rest_below_rounding_stays_finite() -> None:
    """In float32 the probabilities of the likeliest tokens may add up to more than 1."""
    logits = torch.zeros(1, 1, 5)
    logits[..., :3] = 40.0
    student = logits.clone().requires_grad_()
    top = torch.log_softmax(logits, -1).topk(3)
    outputs = {"candidate_logprobs": torch.log_softmax(student, -1).gather(-1, top.indices)}
    batch = {
        "response_mask": torch.ones(1, 1, dtype=torch.bool),
        "candidate_ids": top.indices,
        "teacher_candidate_logprobs": top.values,
    }
    loss, metrics = DistillationLoss()(outputs, batch)
    loss.backward()
    assert abs(float(loss.detach())) < 1e-5
    assert student.grad is not None
    assert float(student.grad.abs().max()) < 1e-5
    assert all(math.isfinite(value) for value, _ in metrics.values())


def test_the_sampler_is_compared_where_its_log_probs_are_there() -> None:
    outputs, batch = build(distributions(0), distributions(1), 3)
    generator = torch.Generator().manual_seed(5)
    current, sampled = torch.randn(2, B, T, generator=generator, dtype=torch.float64)
    sampled[~MASK] = torch.nan
    _, metrics = DistillationLoss()(outputs | {"logprobs": current}, batch | {"rollout_logprobs": sampled})
    gaps = (current - sampled)[MASK]
    np.testing.assert_allclose(metrics["rollout/mismatch_k3"], ((gaps.exp() - 1 - gaps).sum(), 4.0), rtol=1e-10)


def test_it_says_what_it_reads() -> None:
    loss = DistillationLoss(aggregation=Aggregation(mode="prompt-mean"))
    columns = {"response_mask", "group_tokens", "candidate_ids", "teacher_candidate_logprobs", "rollout_logprobs?"}
    assert set(loss.reads) == columns
    assert "candidate_logprobs" in loss.outputs
