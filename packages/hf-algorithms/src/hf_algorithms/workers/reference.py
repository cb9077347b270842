"""The reference: the frozen policy that bounds the actor's divergence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_algorithms.workers._model import SEQUENCE, ModelWorker, on_device
from hf_protocols import THREE_D, register

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["ReferenceWorker"]


class ReferenceWorker(ModelWorker):
    """One rank of the reference model; it is sharded like the actor and never trained."""

    trainable = False

    @register(protocol=THREE_D, reads=SEQUENCE, writes=("ref_logprobs",), kind="inference")
    @on_device
    def compute_ref_logprobs(self, batch: TensorDict, *, temperature: float = 1.0) -> TensorDict:
        """``ref_logprobs`` of the response tokens, jagged [B, T]."""
        return self._train.compute_logprobs(batch, temperature=temperature).rename_key_("logprobs", "ref_logprobs")
