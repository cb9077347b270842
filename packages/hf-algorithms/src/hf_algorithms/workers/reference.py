"""Frozen policies that score the actor's tokens: the reference and a teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_algorithms.workers._model import SEQUENCE, ModelWorker, on_device
from hf_protocols import THREE_D, register

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["ReferenceWorker", "TeacherWorker"]


class ReferenceWorker(ModelWorker):
    """One rank of the reference model; it is sharded like the actor and never trained."""

    trainable = False

    @register(protocol=THREE_D, reads=SEQUENCE, writes=("ref_logprobs",), kind="inference")
    @on_device
    def compute_ref_logprobs(self, batch: TensorDict, *, temperature: float = 1.0) -> TensorDict:
        """``ref_logprobs`` of the response tokens, jagged [B, T]."""
        return self._train.compute_logprobs(batch, temperature=temperature).rename_key_("logprobs", "ref_logprobs")


class TeacherWorker(ModelWorker):
    """One rank of a model that the actor learns from; it is never trained."""

    trainable = False

    @register(protocol=THREE_D, reads=SEQUENCE, writes=("teacher_logprobs",), kind="inference")
    @on_device
    def compute_teacher_logprobs(self, batch: TensorDict, *, temperature: float = 1.0) -> TensorDict:
        """`teacher_logprobs` of the response tokens, jagged [B, T]."""
        found = self._train.compute_logprobs(batch, temperature=temperature)
        return found.rename_key_("logprobs", "teacher_logprobs")
