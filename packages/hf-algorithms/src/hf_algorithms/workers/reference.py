"""Frozen policies that score the actor's tokens: the reference and a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from hf_algorithms.workers._model import SEQUENCE, ModelWorker, on_device
from hf_protocols import THREE_D, register

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["ReferenceWorker", "TeacherWorker"]


class ReferenceWorker(ModelWorker):
    """One rank of the reference model; it is sharded like the actor and never trained."""

    base_methods: ClassVar[Mapping[str, str]] = {"compute_ref_logprobs": "compute_base_logprobs"}
    """By method, the one with which a policy with adapters answers in this role's place, its adapters off."""

    trainable = False

    @register(protocol=THREE_D, reads=SEQUENCE, writes=("ref_logprobs",), kind="inference")
    @on_device
    def compute_ref_logprobs(self, batch: TensorDict, *, temperature: float = 1.0) -> TensorDict:
        """`ref_logprobs` of the response tokens, jagged [B, T]."""
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

    @register(
        protocol=THREE_D, reads=SEQUENCE, writes=("candidate_ids", "teacher_candidate_logprobs"), kind="inference"
    )
    @on_device
    def compute_teacher_candidates(self, batch: TensorDict, *, top_k: int, temperature: float = 1.0) -> TensorDict:
        """The likeliest tokens at each response token, the likeliest first.

        Returns:
            `candidate_ids` int32 and `teacher_candidate_logprobs` float32, jagged [B, T, top_k]: 8 top_k bytes for each
            response token, 256 with 32.
        """
        found = self._train.compute_logprobs(batch, temperature=temperature, top_k=top_k)
        found = found.select("top_ids", "top_logprobs").rename_key_("top_logprobs", "teacher_candidate_logprobs")
        return found.set("candidate_ids", found.pop("top_ids").int())
