"""On-policy distillation: the student's own responses, scored by a teacher token by token (Agarwal et al. 2024).

The advantage of a token is the teacher's log-prob less the student's: a sample of the reverse KL, not accumulated over
what follows. The teacher's model is `[roles.teacher] path`; it has the student's tokenizer. Scores of the reward are
reported and train nothing.

Deviation from the paper: the loss is a policy gradient on the sampled token, not a divergence over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from hf_algorithms.recipes._config import ClipKeys, PolicyConfig
from hf_algorithms.recipes._recipe import Recipe, Role, StepContext
from hf_algorithms.recipes._roles import POLICY_ROLES
from hf_algorithms.recipes._steps import add_old_logprobs, add_ref_logprobs, build_clip, generate_scored, update_policy

if TYPE_CHECKING:
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture, MetricsFuture

__all__ = ["DISTILLATION", "TEACHER", "DistillationConfig", "step"]

TEACHER = Role(name="teacher", worker="hf_algorithms.workers:TeacherWorker", has_model=True)


class DistillationConfig(ClipKeys, PolicyConfig):
    """`[algorithm]` with `name = "distillation"`."""

    needs_keys: ClassVar[tuple[str, ...]] = ("roles.teacher.path",)

    name: Literal["distillation"] = "distillation"

    @property
    def reader_of_old_logprobs(self) -> str | None:
        """The setting that makes something read old log-probs before the update: advantages are taken to them."""
        return "algorithm.name = 'distillation'"


def step(
    roles: Roles, prompts: BatchFuture, config: DistillationConfig, context: StepContext
) -> Sequence[MetricsFuture]:
    """One iteration; every line returns at once, and the data flows from worker to worker."""
    from hf_algorithms.advantages import TeacherAdvantage

    batch = add_old_logprobs(roles, generate_scored(roles, prompts, context), config, context)
    batch = add_ref_logprobs(roles, batch, config, context)
    batch = batch.union(roles.teacher.compute_teacher_logprobs(batch, temperature=context.sampling.temperature))
    batch = batch.union(roles.advantage.compute_advantages(batch, TeacherAdvantage()))
    metrics = roles.advantage.compute_metrics(batch, compares_sampler=config.old_source != "sampled")
    return [metrics, *update_policy(roles, batch, config, context, build_clip(config))]


DISTILLATION = Recipe(name="distillation", config=DistillationConfig, roles=(*POLICY_ROLES, TEACHER), step=step)
