"""On-policy distillation: the student's own responses, scored by a teacher token by token (Agarwal et al. 2024).

`signal = "sampled"`: the advantage of a token is the teacher's log-prob less the student's, a sample of the reverse KL,
not accumulated over what follows. `signal = "top_k"`: the loss is the reverse KL itself at every token, over the
teacher's `top_k` likeliest tokens and all others as one outcome, with its whole gradient.

The teacher's model is `[roles.teacher] path`; it has the student's tokenizer. Scores of the reward are reported and
train nothing.

Deviations from the paper:

- with `"sampled"` the loss is a policy gradient on the sampled token, not a divergence over the vocabulary; the
  logarithm of its ratio is cut at -20 and 20;
- with `"top_k"` all tokens but the teacher's `top_k` likeliest count as one outcome. The divergence is taken at the
  student's own responses, and its gradient does not reach back to the tokens that led there. It has no ratio, so
  corrections of the sampler's mismatch do not apply.

`"top_k"` adds two columns to the batch, 8 `top_k` bytes for each response token: 256 with 32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from hf_algorithms.recipes._config import ClipKeys, PolicyConfig
from hf_algorithms.recipes._recipe import Recipe, Role, StepContext
from hf_algorithms.recipes._roles import POLICY_ROLES
from hf_algorithms.recipes._steps import (
    add_old_logprobs,
    add_ref_logprobs,
    build_aggregation,
    build_clip,
    generate_scored,
    mini_batches,
    update_policy,
)
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture, MetricsFuture
    from hf_protocols import ModelShape

__all__ = ["DISTILLATION", "TEACHER", "DistillationConfig", "step"]

TEACHER = Role(name="teacher", worker="hf_algorithms.workers:TeacherWorker", has_model=True)

_OF_THE_POLICY_GRADIENT = (
    "old_logprobs",
    "log_ratio_clamp",
    "clip_low",
    "clip_high",
    "dual_clip",
    "correction",
    "kl_coefficient",
    "entropy_coefficient",
)
"""Keys that mean nothing with `signal = "top_k"`."""


class DistillationConfig(ClipKeys, PolicyConfig):
    """`[algorithm]` with `name = "distillation"`."""

    needs_keys: ClassVar[tuple[str, ...]] = ("roles.teacher.path",)

    name: Literal["distillation"] = "distillation"
    signal: Literal["sampled", "top_k"] = "sampled"
    """`sampled`: a policy gradient on the teacher's log-prob of the sampled token. `top_k`: the divergence over the
    teacher's likeliest tokens, without a policy gradient.
    """
    top_k: Annotated[int, Field(ge=1)] = 32
    """Tokens that `signal = "top_k"` distinguishes; all others count as one outcome."""

    @property
    def reader_of_old_logprobs(self) -> str | None:
        """The setting that makes something read old log-probs before the update: advantages are taken to them."""
        return "algorithm.signal = 'sampled'" if self.signal == "sampled" else None

    def find_contradictions(self) -> Iterator[str]:
        """Yields one line for every pair of keys that cannot go together."""
        yield from super().find_contradictions()
        if self.signal == "sampled":
            return
        for key in _OF_THE_POLICY_GRADIENT:
            if self.changes(key):
                yield (
                    f"algorithm.{key} = {show(getattr(self, key))}: algorithm.signal = 'top_k' has no policy gradient, "
                    "which it belongs to. Remove it, or use signal = 'sampled'"
                )

    def find_misfits(self, models: Mapping[str, ModelShape]) -> Iterator[str]:
        """Yields one line for every key that does not fit the roles' models, by role."""
        yield from super().find_misfits(models)
        if self.signal == "sampled":
            return
        role = min(("actor", "teacher"), key=lambda name: models[name].vocab_size)
        size = models[role].vocab_size
        if self.top_k >= size:
            yield (
                f"algorithm.top_k = {self.top_k}: the {role}'s vocabulary has {size} tokens, and at least one must be "
                f"left for the rest. Lower it to at most {size - 1}"
            )


def step(
    roles: Roles, prompts: BatchFuture, config: DistillationConfig, context: StepContext
) -> Sequence[MetricsFuture]:
    """One iteration; every line returns at once, and the data flows from worker to worker."""
    from hf_algorithms.advantages import TeacherAdvantage

    batch = generate_scored(roles, prompts, context)
    if config.signal == "top_k":
        return _learn_distributions(roles, batch, config, context)
    batch = add_ref_logprobs(roles, add_old_logprobs(roles, batch, config, context), config, context)
    batch = batch.union(roles.teacher.compute_teacher_logprobs(batch, temperature=context.sampling.temperature))
    batch = batch.union(roles.advantage.compute_advantages(batch, TeacherAdvantage()))
    metrics = roles.advantage.compute_metrics(batch, compares_sampler=config.old_source != "sampled")
    return [metrics, *update_policy(roles, batch, config, context, build_clip(config))]


def _learn_distributions(
    roles: Roles, batch: BatchFuture, config: DistillationConfig, context: StepContext
) -> Sequence[MetricsFuture]:
    from hf_algorithms.losses import DistillationLoss

    temperature = context.sampling.temperature
    batch = batch.union(roles.teacher.compute_teacher_candidates(batch, top_k=config.top_k, temperature=temperature))
    loss = DistillationLoss(aggregation=build_aggregation(config, max_new_tokens=context.sampling.max_new_tokens))
    return [
        roles.advantage.compute_metrics(batch),
        *(
            roles.actor.update_actor(rows, loss, temperature=temperature)
            for rows in mini_batches(roles, batch, config, context)
        ),
    ]


DISTILLATION = Recipe(name="distillation", config=DistillationConfig, roles=(*POLICY_ROLES, TEACHER), step=step)
