"""What data-parallel ranks agree on before they act together: one rank's trouble must stop them all, or none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite

import torch
import torch.distributed as dist

from hf_engine.backends._micro_batches import MicroBatch, SequenceBatch
from hf_protocols.errors import BackendError, BatchError, NonFiniteLossError, ReshardError

__all__ = ["agree_on_micro_batches", "lost_peers_are_errors", "refuse_non_finite"]


@contextmanager
def lost_peers_are_errors(method: str) -> Iterator[None]:
    """Names the method whose collective failed because a rank died or did not come within the groups' deadline.

    Raises:
        BackendError: in place of torch.distributed's error.
    """
    try:
        yield
    except (RuntimeError, ReshardError) as error:
        reason = error.__cause__ if isinstance(error, ReshardError) else error
        # gloo's errors have no class of their own, but name its source files.
        if not isinstance(reason, dist.DistError) and "gloo" not in str(reason):
            raise
        raise BackendError(
            f"{method} lost another rank on rank {dist.get_rank()}: {reason}; that rank's own error says why. The "
            "process groups cannot be used again: start the ranks anew from a checkpoint. A rank that was only slow "
            "needs a longer timeout of init_process_group"
        ) from error


def agree_on_micro_batches(
    sequences: SequenceBatch, max_tokens: int, group: dist.ProcessGroup, device: torch.device
) -> list[MicroBatch]:
    """This rank's micro-batches, and as many dummies as keep it in step with the rank that has most.

    Args:
        sequences: this rank's rows.
        max_tokens: bound on the tokens of a micro-batch, padding included.
        group: the data-parallel ranks.
        device: where the group communicates.

    Raises:
        BatchError: on every rank, if any refuses its rows.
    """
    refusal: BatchError | None = None
    micro_batches: list[MicroBatch] = []
    try:
        micro_batches = sequences.micro_batches(max_tokens)
    except BatchError as error:
        refusal = error
    agreed = torch.tensor([len(micro_batches), refusal is not None], device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    num_micro_batches, refused = agreed.tolist()
    if refused:
        raise refusal or BatchError("another data-parallel rank refused its rows; its own error says why")
    return micro_batches + [MicroBatch.dummy() for _ in range(num_micro_batches - len(micro_batches))]


def refuse_non_finite(loss: float, grad_norm: float, steps: int) -> None:
    """Refuses an optimizer step.

    Args:
        loss: summed over all ranks.
        grad_norm: the global one.
        steps: optimizer steps taken so far.

    Raises:
        NonFiniteLossError: if either number is not finite.
    """
    if not (isfinite(loss) and isfinite(grad_norm)):
        raise NonFiniteLossError(
            f"optimizer step {steps + 1} was refused: the loss summed over all ranks is {loss}, its gradient norm "
            f"{grad_norm}; the weights are still those of step {steps}. Lower the learning rate or look for "
            "non-finite numbers in the batch"
        )
