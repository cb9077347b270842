"""The policy's loss: a surrogate, a correction of the sampler, a KL term and an aggregation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import getattr_static, signature
from typing import Literal

import torch

from hf_algorithms.kl import estimate_kl
from hf_algorithms.losses._aggregation import Aggregation
from hf_algorithms.losses._correction import Correction, measure_mismatch
from hf_algorithms.losses._kl_term import KLTerm
from hf_algorithms.losses._loss import Metrics
from hf_algorithms.losses._surrogates import Clip, Surrogate, Tokens
from hf_algorithms.users_code import describe_raised
from hf_protocols import BatchError, ConfigError
from hf_protocols.foreign_code import raised_as
from hf_protocols.similar_names import find_similar
from hf_protocols.validation import Checks, describe_names, show

__all__ = ["GAP_BOUND", "PolicyLoss"]

_check = Checks(ConfigError)

GAP_BOUND = 0.1
"""Nats: log-probs are counted on which two engines differ by more. In float32 it is 1e-5, in bfloat16 0.01 to 0.05."""

_READABLE = ("advantages", "old_logprobs", "rollout_logprobs")
"""Columns that `Tokens` give a surrogate."""


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """Aggregates, over trained tokens, correction weight * surrogate + KL term - entropy coefficient * entropy.

    Raises:
        ConfigError: for an unknown `old`, a clamp of at most 0, or an entropy coefficient below 0; for a surrogate
            that reads a column that `Tokens` do not have.
    """

    surrogate: Surrogate = field(default_factory=Clip)
    aggregation: Aggregation = field(default_factory=Aggregation)
    correction: Correction | None = None
    kl: KLTerm | None = None
    entropy_coefficient: float = 0.0
    """Weight of the entropy of the policy's distributions, in nats, by which the loss is reduced (Mnih et al. 2016).

    Its gradient is exact: no sample stands for the distribution. Old log-probs and corrections do not weigh it.
    """
    old: Literal["column", "current"] = "column"
    """Log-probs of the policy at the start of the update: `old_logprobs`, or the current ones without their gradient.

    `current` is exact where a batch is used for one update, and saves a forward pass.
    """
    log_ratio_clamp: float | None = 20.0
    """The logarithm of a ratio is clamped to this size, where its gradient ends; None: not clamped.

    Beyond about 88 a float32 ratio is infinite, and its gradient NaN.
    """

    def __post_init__(self) -> None:
        _check.one_of("old", self.old, ("column", "current"))
        if self.log_ratio_clamp is not None:
            _check.number("log_ratio_clamp", self.log_ratio_clamp)
        _check.number("entropy_coefficient", self.entropy_coefficient, may_be_zero=True)
        _check_surrogate(self.surrogate)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Outputs of the model; with a coefficient of 0 the entropy serves a metric alone, and may be absent."""
        return ("logprobs", "entropy")

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns of the batch; one whose name ends in `?` serves metrics alone."""
        needed = set(self.surrogate.reads)
        if self.correction is not None:
            needed |= {"old_logprobs", "rollout_logprobs"}
        if self.kl is not None and self.kl.gradient == "ratio":
            needed.add("old_logprobs")
        optional = {"old_logprobs"} if self.old == "column" else {"rollout_logprobs"}
        if self.old == "current":
            needed.discard("old_logprobs")
        marked = (*sorted(needed), *(f"{name}?" for name in sorted(optional - needed)))
        reference = ("ref_logprobs",) if self.kl is not None else ()
        return (*self.aggregation.reads, "advantages", *marked, *reference)

    def count(self, columns: Mapping[str, torch.Tensor]) -> float:
        """Returns these rows' share of the denominator; see `Aggregation.count`."""
        return self.aggregation.count(columns)

    def __call__(
        self, outputs: Mapping[str, torch.Tensor], micro_batch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Metrics]:
        """Returns the weighted sum of the token losses and metrics; the role's name comes before those without a slash.

        `policy_loss` is the surrogate's part, aggregated. `clip_low` and `clip_high` are the shares of trained tokens
        whose loss a clip changed. `update_kl` estimates KL(old || current) in nats per token. `entropy` is the mean
        over trained tokens of the distribution's entropy, in nats, before the step.
        `rollout/*` compares sampler and trainer. `kl/*` and `kl_sequence/*` compare policy and reference, if there is
        a KL term and the batch has no `old_logprobs`; with them `compute_metrics` reports both before the update. A
        `Clip` with `ratio_cap` adds `truncated_fraction`, and `sampler_gap`, the mean of |lp - old lp|; `..._max` is
        the largest, and `..._share` the share of tokens above `GAP_BOUND`. Later updates of an iteration add their own
        change.

        Args:
            outputs: `logprobs` and `entropy` [b, T], with the gradient.
            micro_batch: the columns of `reads`, padded.

        Raises:
            BatchError: if a column is missing, or the entropy where it has a coefficient; if a surrogate of a user's
                own raises, or returns something else than it should.
        """
        mask = self.aggregation.select(micro_batch)
        columns = self._read(micro_batch, mask)
        logprobs = outputs["logprobs"].masked_fill(~mask, 0.0)
        rollout = columns.get("rollout_logprobs")
        tokens = Tokens(
            logprobs=logprobs,
            old_logprobs=columns.get("old_logprobs", logprobs.detach()),
            advantages=columns["advantages"],
            mask=mask,
            log_ratio_clamp=self.log_ratio_clamp,
            rollout_logprobs=rollout,
        )
        token_loss, clips = _ask(self.surrogate, tokens)
        correction = None
        if self.correction is not None and rollout is not None:
            correction = self.correction.weigh(tokens.old_logprobs, rollout, mask)
            token_loss = token_loss * correction
        weights = self.aggregation.weigh(mask, micro_batch).to(token_loss.dtype)
        loss = (weights * token_loss).sum()
        metrics = {"policy_loss": (float(loss.detach()), self.aggregation.count(micro_batch))}
        if "old_logprobs" in columns or self.old == "current":
            metrics |= _measure_update(tokens)
        if isinstance(self.surrogate, Clip) and self.surrogate.ratio_cap is not None:
            metrics |= _measure_gaps(tokens)
        if rollout is not None and (self.correction is not None or self.old == "current"):
            metrics |= measure_mismatch(tokens.old_logprobs, rollout, mask, correction)
        if self.kl is not None:
            ratio = tokens.compute_ratio() if self.kl.gradient == "ratio" else None
            loss = loss + (weights * self.kl(logprobs, columns["ref_logprobs"], ratio)).sum()
            if "old_logprobs" not in columns:
                metrics |= _measure_kl(outputs["logprobs"], micro_batch)
        entropy = self._read_entropy(outputs, mask)
        if entropy is not None:
            metrics["entropy"] = (float(entropy.detach().sum()), float(mask.sum()))
            if self.entropy_coefficient:
                loss = loss - self.entropy_coefficient * (weights * entropy).sum()
        if taken := sorted(metrics.keys() & clips.keys()):
            raise BatchError(
                f"surrogate {type(self.surrogate).__name__}: it returned a mask named {show(taken[0])}, which the loss "
                "itself reports. Rename it"
            )
        return loss, metrics | _measure_clips(clips, mask)

    def _read_entropy(self, outputs: Mapping[str, torch.Tensor], mask: torch.Tensor) -> torch.Tensor | None:
        """The entropies [b, T], 0 where the mask is False; None where the model gave none and none is needed."""
        if "entropy" in outputs.keys():  # noqa: SIM118 - a TensorDict cannot be asked otherwise
            return outputs["entropy"].masked_fill(~mask, 0.0)
        if not self.entropy_coefficient:
            return None
        raise BatchError(
            f"entropy_coefficient={show(self.entropy_coefficient)}: the model's outputs have no entropy. "
            "Let the forward pass compute it, train_step(..., entropy=True)"
        )

    def _read(self, micro_batch: Mapping[str, torch.Tensor], mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """The [b, T] columns that are read and there, 0 where the mask is False."""
        present = set(micro_batch.keys())
        missing = [name for name in self.reads if not name.endswith("?") and name not in present]
        if missing:
            raise BatchError(
                f"column {missing[0]!r} of the batch: is missing, and {type(self.surrogate).__name__} with these "
                f"options reads it. The batch has {describe_names(sorted(present))}. Compute it before the update"
            )
        names = {name.removesuffix("?") for name in self.reads} - set(self.aggregation.reads)
        return {name: micro_batch[name].masked_fill(~mask, 0.0) for name in names & present}


def _check_surrogate(surrogate: Surrogate) -> None:
    """Refuses an object, which may be user code, that cannot be called as a surrogate, or reads what it never gets."""
    if isinstance(surrogate, type):
        raise ConfigError(f"surrogate {surrogate.__name__}: it is a class. Pass an instance, {surrogate.__name__}(...)")
    label = f"surrogate {type(surrogate).__name__}"
    if not callable(surrogate):
        raise ConfigError(f"{label}: {show(surrogate)} cannot be called. Give it a method __call__(self, tokens)")
    try:
        signature(surrogate).bind("tokens")
    except TypeError as error:
        raise ConfigError(f"{label}: it cannot be called with tokens: {error}. Define __call__(self, tokens)") from None
    except ValueError:  # written in C, and says nothing of its arguments
        pass
    if getattr_static(surrogate, "outputs", None) is not None:
        raise ConfigError(
            f"{label}: it has an attribute outputs, and a surrogate gets Tokens alone. Remove outputs, or pass a loss "
            "that has it to roles.actor.update_actor"
        )
    reads: object = getattr(surrogate, "reads", None)
    if not isinstance(reads, tuple) or not all(isinstance(name, str) for name in reads):
        raise ConfigError(
            f"{label}: its attribute reads is {show(reads)}. Set it to a tuple of names among "
            f"{', '.join(_READABLE)}, which may be empty"
        )
    unknown = [name for name in reads if name.removesuffix("?") not in _READABLE]
    if unknown:
        close = find_similar(unknown[0], _READABLE)
        raise ConfigError(
            f"{label} reads {show(unknown[0])}, which is not a column of its tokens: they have {', '.join(_READABLE)}. "
            + (f"Did you mean {close[0]}?" if close else "Remove it from reads")
        )


def _ask(surrogate: Surrogate, tokens: Tokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Calls a surrogate, which may be user code, and checks what it returns."""
    label = f"surrogate {type(surrogate).__name__}"
    with raised_as(lambda error: BatchError(f"{label} raised {describe_raised(error)}")):
        answer: object = surrogate(tokens)
    match answer:
        case (torch.Tensor() as loss, dict() as clips):
            pass
        case _:
            raise BatchError(
                f"{label}: it returned {type(answer).__name__}. Return the loss of each token [b, T], and a dict of "
                "the masks of active clips, which may be empty"
            )
    for name, value in {"the loss": loss, **clips}.items():
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else show(value)
        if shape != tuple(tokens.mask.shape):
            raise BatchError(
                f"{label}: {name} has the shape {shape}. Return a number for each token, {tuple(tokens.mask.shape)}"
            )
    for name, active in clips.items():
        if active.dtype != torch.bool:
            raise BatchError(f"{label}: the mask {name} has dtype {active.dtype}. Return True where a clip is active")
    if tokens.logprobs.requires_grad and torch.is_grad_enabled() and not loss.requires_grad:
        raise BatchError(
            f"{label}: the loss has no gradient. Compute it from tokens.logprobs, without detach() or no_grad()"
        )
    return loss, clips


def _measure_clips(clips: dict[str, torch.Tensor], mask: torch.Tensor) -> Metrics:
    count = float(mask.sum())
    shares = {name: float((clips[name] & mask).sum()) if name in clips else 0.0 for name in ("clip_low", "clip_high")}
    shares |= {name: float((active & mask).sum()) for name, active in clips.items()}
    return {name: (share, count) for name, share in shares.items()}


@torch.no_grad()
def _measure_update(tokens: Tokens) -> Metrics:
    found = estimate_kl(tokens.old_logprobs[tokens.mask], tokens.logprobs[tokens.mask])
    return {"update_kl": (float(found["k3"].sum()), float(tokens.mask.sum()))}


@torch.no_grad()
def _measure_gaps(tokens: Tokens) -> Metrics:
    gaps = tokens.log_ratio.abs()[tokens.mask]
    count = float(len(gaps))
    return {
        "sampler_gap": (float(gaps.sum()), count),
        "sampler_gap_max": (float(gaps.max()), 1.0) if count else (0.0, 0.0),
        "sampler_gap_share": (float((gaps > GAP_BOUND).sum()), count),
    }


@torch.no_grad()
def _measure_kl(logprobs: torch.Tensor, micro_batch: Mapping[str, torch.Tensor]) -> Metrics:
    """The divergence from the reference, as `compute_metrics` has it: also of responses that a filter leaves out."""
    mask = micro_batch["response_mask"].bool()
    count, rows = float(mask.sum()), float(len(mask))
    found = estimate_kl(logprobs[mask], micro_batch["ref_logprobs"][mask])
    sums = {name: float(each.sum()) for name, each in found.items()}
    per_token: Metrics = {f"kl/{name}": (each, count) for name, each in sums.items()}
    return per_token | {f"kl_sequence/{name}": (sums[name], rows) for name in ("k1", "k3")}
