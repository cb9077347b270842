"""Loss functions: the results that they may return, and the use of their metrics."""

from __future__ import annotations

import gc
import re
import weakref

import pytest
import torch
from tensordict import TensorDict

from hf_engine.training.loss import StepLoss
from hf_engine.training.micro_batches import SequenceBatch
from hf_protocols import BackendError


def evaluate(answer):
    """The step's loss after one micro-batch of two response tokens, and the metrics' own tensors."""
    row = torch.nested.nested_tensor([torch.tensor([1, 2])], layout=torch.jagged)
    sequences = SequenceBatch(TensorDict({"prompt_ids": row, "response_ids": row}, batch_size=[1]))
    step = StepLoss(lambda outputs, _: answer(outputs["logprobs"]), sequences, torch.device("cpu"))
    (micro_batch,) = sequences.micro_batches(10)
    step.of(micro_batch, {"logprobs": torch.tensor([[-1.0, -2.0]], requires_grad=True)})
    if step.error is not None:
        raise step.error
    return step


def test_metrics_are_numbers_that_hold_no_graph():
    graphs = []

    def answer(logprobs):
        loss = -(logprobs * 2).sum()
        graphs.append(weakref.ref(loss))
        return loss, {"loss": (loss, torch.tensor(2)), "whole": (3, 1.0)}

    step = evaluate(answer)
    gc.collect()
    assert step.metrics == {"loss": (6.0, 2.0), "whole": (3.0, 1.0)}
    assert all(type(number) is float for pair in step.metrics.values() for number in pair)
    assert graphs[0]() is None


def test_micro_batches_are_merged_and_a_largest_stays():
    row = torch.nested.nested_tensor([torch.tensor([1, 2])] * 3, layout=torch.jagged)
    sequences = SequenceBatch(TensorDict({"prompt_ids": row, "response_ids": row}, batch_size=[3]))
    answers = iter([(4.0, 2.0), (9.0, 1.0), (1.0, 1.0)])

    def loss_fn(outputs, _):
        pair = next(answers)
        return outputs["logprobs"].sum(), {"gap": pair, "gap_max": (pair[0], 1.0)}

    step = StepLoss(loss_fn, sequences, torch.device("cpu"))
    for micro_batch in sequences.micro_batches(4):
        step.of(micro_batch, {"logprobs": torch.zeros(1, 2, requires_grad=True)})
    assert step.metrics == {"gap": (14.0, 4.0), "gap_max": (9.0, 1.0)}


PAIR = "Return (loss_sum, metrics): a tensor of one number, and (sum, count) by name"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda logprobs: logprobs.sum(), f"loss_fn gave a tensor of shape (). {PAIR}"),
        (lambda logprobs: None, f"loss_fn gave None. {PAIR}"),
        (lambda logprobs: (logprobs.sum(),), f"loss_fn gave a tuple of 1. {PAIR}"),
        (lambda logprobs: (logprobs.sum(), {}, 1.0), f"loss_fn gave a tuple of 3. {PAIR}"),
        (lambda logprobs: (logprobs.detach().sum() + torch.zeros((), requires_grad=True), {}), "reaches no output"),
        (lambda logprobs: (torch.ones((), requires_grad=True), {}), "reaches no output. Compute it from the outputs"),
        (lambda logprobs: (logprobs.sum(), None), "loss_fn gave None as metrics. Return (sum, count) by name"),
        (
            lambda logprobs: (logprobs.sum(), {"a": 1.0}),
            "loss_fn gave 1.0 as metric 'a'. Return (sum, count), two numbers",
        ),
        (lambda logprobs: (logprobs.sum(), {"a": (1.0, "b")}), "gave (1.0, 'b') as metric 'a'. Return (sum, count)"),
        (lambda logprobs: (logprobs.sum(), {"a": (logprobs, 1)}), "as metric 'a'. Return (sum, count)"),
        (
            lambda logprobs: (logprobs.sum(), {3: (1.0, 1.0)}),
            "loss_fn gave 3 as a metric's name. Name metrics by strings",
        ),
        (
            lambda logprobs: (logprobs.sum(), {"grad_norm": (1.0, 1.0)}),
            "metric 'grad_norm' has a name that the step itself uses (grad_norm, learning_rate, skipped_nonfinite, ",
        ),
        (lambda logprobs: (logprobs.sum(), {"learning_rate": (1.0, 1.0)}), "metric 'learning_rate' has a name"),
    ],
)
def test_an_answer_of_another_kind_is_one_error(answer, message):
    with pytest.raises(BackendError, match=re.escape(message)):
        evaluate(answer)


def test_a_loss_object_is_named_by_its_class():
    class OwnLoss:
        def __call__(self, outputs, _):
            return outputs["logprobs"].detach().sum(), {}

    row = torch.nested.nested_tensor([torch.tensor([1, 2])], layout=torch.jagged)
    sequences = SequenceBatch(TensorDict({"prompt_ids": row, "response_ids": row}, batch_size=[1]))
    step = StepLoss(OwnLoss(), sequences, torch.device("cpu"))
    step.of(next(iter(sequences.micro_batches(4))), {"logprobs": torch.zeros(1, 2, requires_grad=True)})
    assert str(step.error).startswith("loss_fn OwnLoss gave a loss_sum without gradient")
