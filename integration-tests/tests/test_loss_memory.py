"""Memory of a loss's logits: the mapper's figure against PyTorch's and hf-engine's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hf_engine.training import token_logprobs
from hf_mapper import SoftwareSpec, WorkloadSpec
from hf_mapper.simulators.layouts import read_layouts
from hf_mapper.simulators.memory import training_work_bytes
from hf_mapper.software import FSDP
from hf_protocols import ModelShape, ParallelSpec

TOKENS, VOCABULARY = 1024, 50_000


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.float(), labels)


def mean_of_logprobs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return token_logprobs.compute_token_logprobs(logits, labels)[0].mean()


@pytest.mark.parametrize(("software", "loss"), [(FSDP, cross_entropy), (SoftwareSpec(), mean_of_logprobs)])
def test_a_loss_takes_what_is_counted(
    software: SoftwareSpec, loss: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the peak of a step; what is before the logits weighs nothing next to the vocabulary."""
    monkeypatch.setattr(token_logprobs, "_CHUNK_ELEMENTS", 1)  # a part of many tokens
    shape = dataclasses.replace(ModelShape.preset("llama-2-7b"), vocab_size=1)
    workload = WorkloadSpec(
        global_batch=1,
        prompt_tokens=TOKENS // 2,
        response_tokens=TOKENS // 2,
        recompute="none",
        software=software,
        micro_batch_tokens=TOKENS,
    )
    counted = [
        training_work_bytes(model, read_layouts(model, ParallelSpec(), "fsdp"), workload)
        for model in (shape, dataclasses.replace(shape, vocab_size=1 + VOCABULARY))
    ]
    taken = peak_bytes(loss, torch.randn(TOKENS, 1, dtype=torch.bfloat16))
    assert float(counted[1] - counted[0]) == pytest.approx(taken, rel=0.01)


def peak_bytes(loss: Callable[..., torch.Tensor], hidden: torch.Tensor) -> int:
    """The most that is live at once of what a loss over 16-bit logits and its backward pass take."""
    head = torch.randn(1, VOCABULARY, dtype=torch.bfloat16)
    for tensor in (hidden, head):
        tensor.requires_grad_()
    labels = torch.zeros(len(hidden), dtype=torch.int64)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        # A sum in place of a product: processors without 16-bit arithmetic multiply with scratch of 32 bits.
        loss(hidden + head, labels).backward()
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak
