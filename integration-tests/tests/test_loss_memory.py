"""What the mapper counts for the logits of a loss, against what PyTorch's cross entropy takes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hf_mapper import WorkloadSpec
from hf_mapper.simulators.layouts import read_layouts
from hf_mapper.simulators.memory import training_work_bytes
from hf_mapper.software import FSDP
from hf_protocols import ModelShape, ParallelSpec

TOKENS = 64


def test_a_loss_takes_what_is_counted() -> None:
    """At the peak of a step; the narrow dimension before the head weighs nothing beside the vocabulary."""
    shape = dataclasses.replace(ModelShape.preset("llama-2-7b"), vocab_size=1)
    workload = WorkloadSpec(
        global_batch=1, prompt_tokens=32, response_tokens=32, recompute="none", software=FSDP, micro_batch_tokens=TOKENS
    )
    counted = [
        training_work_bytes(model, read_layouts(model, ParallelSpec(), "fsdp"), workload)
        for model in (shape, dataclasses.replace(shape, vocab_size=50_001))
    ]
    taken = peak_bytes(torch.randn(TOKENS, 4, dtype=torch.bfloat16), torch.randn(50_000, 4, dtype=torch.bfloat16))
    assert float(counted[1] - counted[0]) == pytest.approx(taken, rel=0.01)


def peak_bytes(hidden: torch.Tensor, head: torch.Tensor) -> int:
    """The most that is live at once of what a loss over 16-bit logits and its backward pass take."""
    for tensor in (hidden, head):
        tensor.requires_grad_()
    labels = torch.zeros(len(hidden), dtype=torch.int64)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.nn.functional.cross_entropy((hidden @ head.T).float(), labels).backward()
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak
