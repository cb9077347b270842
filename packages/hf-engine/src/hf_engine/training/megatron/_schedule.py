"""Micro-batches through the pipeline: megatron-core's schedules, forward only and 1F1B."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from hf_engine.training.megatron._core import get_forward_backward_func, quiet
from hf_engine.training.megatron._inputs import DecoderInputs
from hf_engine.training.micro_batches import MicroBatch

__all__ = ["run_backward", "run_forward"]


def run_forward(
    model: Any,
    micro_batches: Sequence[MicroBatch],
    compute: Callable[[MicroBatch, torch.Tensor], Any],
    *,
    window: int | None,
    device: torch.device,
) -> list[Any]:
    """Calls `compute(micro_batch, hidden [n, h])` on the last stage for each micro-batch, in order.

    Returns:
        The results on the last stage, nothing on others.
    """

    def finish(micro_batch: MicroBatch, hidden: torch.Tensor, *, non_loss_data: bool) -> Any:
        assert non_loss_data
        return compute(micro_batch, hidden)

    # Buffers that megatron-core keeps are written in training, too, which tensors of inference mode cannot be.
    with torch.inference_mode(False), torch.no_grad():
        return _run(model, micro_batches, finish, window, device, forward_only=True, collect_non_loss_data=True)


def run_backward(
    model: Any,
    micro_batches: Sequence[MicroBatch],
    compute_loss: Callable[[MicroBatch, torch.Tensor], torch.Tensor],
    *,
    window: int | None,
    device: torch.device,
) -> None:
    """Adds this rank's gradients of the sum of `compute_loss(micro_batch, hidden [n, h])`."""

    def finish(micro_batch: MicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        # With a third item the schedule does not divide by the number of micro-batches.
        return compute_loss(micro_batch, hidden), torch.zeros((), dtype=torch.int, device=device), None

    _run(model, micro_batches, finish, window, device)


def _run(
    model: Any,
    micro_batches: Sequence[MicroBatch],
    finish: Callable[..., Any],
    window: int | None,
    device: torch.device,
    **options: bool,
) -> list[Any]:
    def step(iterator: Iterator[MicroBatch], stage: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        micro_batch = next(iterator)
        decoder = stage.module if hasattr(stage, "ddp_config") else stage
        ranks = decoder.pg_collection.tp.size()
        dtype = decoder.config.params_dtype
        inputs = DecoderInputs.of(micro_batch, window=window, multiple=ranks, dtype=dtype, device=device)
        hidden = stage(inputs.input_ids, inputs.position_ids, inputs.attention_mask)
        if decoder.post_process:
            hidden = hidden.flatten(0, 1).index_select(0, inputs.predicting)
        return hidden, partial(finish, micro_batch)

    with quiet():
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(micro_batches),
            model=[model],
            num_microbatches=len(micro_batches),
            seq_length=1,  # shapes are sent ahead of every tensor
            micro_batch_size=1,
            **options,
        )
    return results
