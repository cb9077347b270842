"""Keys of `[algorithm]`, in groups that recipes put together: an algorithm has those that mean something for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

if TYPE_CHECKING:
    from hf_algorithms.losses import PreferenceLoss
    from hf_protocols import ModelShape

__all__ = [
    "AggregationMode",
    "AlgorithmConfig",
    "ClipKeys",
    "Coefficient",
    "CriticKeys",
    "GroupKeys",
    "LengthKeys",
    "PolicyConfig",
    "PreferenceKeys",
    "Range",
    "RewardKeys",
    "ScoreClipKeys",
    "Share",
    "StdKeys",
    "WhitenKeys",
]

_LARGEST = 1e6
"""More is a mistake, and overflows where it is squared in float32."""

Coefficient = Annotated[float, Field(ge=0, le=_LARGEST)]
Range = Annotated[float, Field(gt=0, le=_LARGEST)]
Share = Annotated[float, Field(ge=0, le=1)]
AggregationMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant", "prompt-mean"]
Degrees = Annotated[int, Field(ge=0, le=1)]

_CORRECTION_BOUNDS = {
    "none": (0.0, 0.0),
    "tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "sequence_mask": (0.999, 1.002),
    "sequence_mask by product": (0.0, 3.0),
}


class AlgorithmConfig(BaseModel):
    """Keys of `[algorithm]` that every algorithm has; a recipe's own configuration adds to them."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, use_attribute_docstrings=True
    )

    least_samples: ClassVar[int] = 1
    """Responses to a prompt that the algorithm needs; see `rollout.samples_per_prompt`."""
    most_samples: ClassVar[int | None] = None
    """Responses to a prompt that the algorithm takes at most."""
    needs_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of other sections that must have a value, such as `roles.teacher.path`."""

    name: str
    """The algorithm, one of those that `hybridflow algorithms` lists; with `recipe`, the name of your own."""
    recipe: str | None = None
    """Your own recipe, as `module:RECIPE` or `file.py:RECIPE`."""
    conventions: Literal["ours", "trl", "verl", "openrlhf", "nemo"] = "ours"
    """Library whose conventions set the keys below that are left out; see the page on conventions."""
    epochs: Annotated[int, Field(ge=1, le=1000)] = 1
    """Passes over the batch of one iteration."""
    mini_batches: Annotated[int, Field(ge=1)] = 1
    """Updates per pass; each takes a global, seeded share of the rows. Where responses to one prompt are compared, or
    averaged by `prompt-mean`, a share holds whole groups.
    """

    @field_validator("*", mode="before")
    @classmethod
    def _take_lists(cls, value: Any, info: ValidationInfo) -> Any:
        """A list, which is all that TOML has, as a tuple where the key is one."""
        field = cls.model_fields[info.field_name or ""]
        kinds = {get_origin(each) or each for each in (field.annotation, *get_args(field.annotation))}
        return tuple(value) if type(value) is list and tuple in kinds and list not in kinds else value

    @property
    def keeps_groups(self) -> bool:
        """True if a mini-batch holds all responses to a prompt or none."""
        return self.least_samples > 1

    @property
    def updates_at_once(self) -> bool:
        """True if the first update of an iteration learns all of its rows."""
        return self.mini_batches == 1

    def changes(self, key: str) -> bool:
        """True if `key` has another value than its default."""
        return bool(getattr(self, key) != type(self).model_fields[key].default)

    def find_contradictions(self) -> Iterator[str]:
        """Yields one line for every pair of keys that cannot go together; the first word names a key."""
        yield from ()

    def find_misfits(self, models: Mapping[str, ModelShape]) -> Iterator[str]:
        """Yields one line for every key that does not fit the roles' models, by role; the first word names a key."""
        yield from ()


class PolicyConfig(AlgorithmConfig):
    """Keys of algorithms that update a policy: old log-probs, the KL penalty, the correction, the aggregation."""

    old_logprobs: Literal["auto", "current", "recomputed", "sampled"] = "auto"
    """`current`: from the update itself, exact for one update per iteration. `recomputed`: one more forward pass.
    `sampled`: those of the rollout backend; a clipped ratio is then at most 2. `auto`: `current` where it is
    exact and nothing before the update reads them, else `recomputed`.
    """
    log_ratio_clamp: Range | None = 20.0
    """Largest absolute value of the logarithm of a ratio."""
    kl_coefficient: Coefficient = 0.0
    """Weight of the divergence from the reference model. With 0 no reference model is loaded."""
    kl_place: Literal["reward", "loss", "none"] = "loss"
    """Place of the penalty: the token rewards, or a term of the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of the penalty, with d = logprob - ref_logprob: d, d^2 / 2, or exp(-d) - 1 + d."""
    kl_gradient: Literal["value", "unbiased", "ratio"] = "unbiased"
    """`unbiased`: the term in the loss has the gradient of KL(policy || reference), by a score-function weight of 1.
    `ratio`: the weight is the policy's ratio, which is the same in an iteration's first update.
    `value`: that of the estimator as it is.
    """
    correction: Literal["none", "tis", "icepop", "sequence_mask"] = "none"
    """Weights for the difference between the sampler's log-probs and the trainer's."""
    correction_statistic: Literal["geometric", "product"] = "geometric"
    """Weight of a response that `sequence_mask` bounds: the geometric mean of its tokens' weights, or their product."""
    correction_low: Coefficient | None = None
    """Smallest weight; by default 0 (`tis`), 0.5 (`icepop`), 0.999 (`sequence_mask`), 0 (`sequence_mask` by product).
    """
    correction_high: Range | None = None
    """Largest weight; by default 2 (`tis`), 5 (`icepop`), 1.002 (`sequence_mask`), 3 (`sequence_mask` by product)."""
    entropy_coefficient: Coefficient = 0.0
    """The loss is reduced by this times the entropy of the policy, in nats per token, under the same `aggregation`."""
    aggregation: AggregationMode = "token-mean"
    """Reduction of token losses to one number."""
    loss_denominator: Range | None = None
    """Tokens by which `aggregation = "constant"` divides each response's sum."""
    overlong_filter: bool = False
    """Trains no token of a response that was cut by its length."""

    @property
    def keeps_groups(self) -> bool:
        """True if a mini-batch holds all responses to a prompt or none."""
        return super().keeps_groups or self.aggregation == "prompt-mean"

    @property
    def penalises_rewards(self) -> bool:
        """True if the KL penalty is in the token rewards."""
        return self.kl_place == "reward" and self.kl_coefficient > 0

    @property
    def reward_kl_coefficient(self) -> float:
        """Weight of the KL penalty in the token rewards."""
        return self.kl_coefficient if self.kl_place == "reward" else 0.0

    @property
    def needs_reference(self) -> bool:
        """True if some term reads the log-probs of the reference model."""
        return self.kl_place != "none" and self.kl_coefficient > 0

    @property
    def old_source(self) -> Literal["current", "recomputed", "sampled"]:
        """Source of old log-probs, with `auto` resolved."""
        if self.old_logprobs != "auto":
            return self.old_logprobs
        is_exact = self.epochs * self.mini_batches == 1 and self.reader_of_old_logprobs is None
        return "current" if is_exact else "recomputed"

    @property
    def reader_of_old_logprobs(self) -> str | None:
        """The setting that makes something read old log-probs before the update; None without one."""
        return "algorithm.kl_place = 'reward'" if self.penalises_rewards else None

    @property
    def correction_bounds(self) -> tuple[float, float]:
        """Smallest and largest weight of the correction, with defaults resolved."""
        by_product = self.correction == "sequence_mask" and self.correction_statistic == "product"
        low, high = _CORRECTION_BOUNDS["sequence_mask by product" if by_product else self.correction]
        return (
            low if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )

    def find_contradictions(self) -> Iterator[str]:
        """Yields one line for every pair of keys that cannot go together."""
        yield from super().find_contradictions()
        low, high = self.correction_bounds
        if self.correction != "none" and low >= high:
            yield (
                f"algorithm.correction_low = {low}: algorithm.correction_high = {high} is not above it. "
                "Lower correction_low, or raise correction_high"
            )
        if self.old_logprobs == "current":
            for key in ("epochs", "mini_batches"):
                if (value := getattr(self, key)) > 1:
                    yield (
                        f"algorithm.old_logprobs = 'current': with algorithm.{key} = {value} the policy changes "
                        "between updates. Use 'recomputed'"
                    )
            if self.reader_of_old_logprobs is not None:
                yield (
                    f"algorithm.old_logprobs = 'current': {self.reader_of_old_logprobs} reads them before the update. "
                    "Use 'recomputed'"
                )
        if self.old_logprobs == "sampled" and self.correction != "none":
            yield (
                f"algorithm.correction = '{self.correction}': with algorithm.old_logprobs = 'sampled' the ratio holds "
                "the sampler's difference already. Use 'recomputed', or correction = 'none'"
            )
        if self.correction == "none" and (self.correction_low, self.correction_high) != (None, None):
            yield "algorithm.correction_low, correction_high: algorithm.correction = 'none' has no bounds. Remove them"
        if self.aggregation != "constant" and self.loss_denominator is not None:
            yield (
                f"algorithm.loss_denominator = {self.loss_denominator}: algorithm.aggregation = '{self.aggregation}' "
                "divides by no constant. Remove it"
            )
        if self.penalises_rewards and self.kl_estimator != "k1":
            yield (
                f"algorithm.kl_estimator = '{self.kl_estimator}': with algorithm.kl_place = 'reward' it has another "
                "gradient than the divergence, which may lead away from the reference. Use 'k1'"
            )
        is_in_loss = self.kl_place == "loss" and self.kl_coefficient > 0
        if is_in_loss and self.kl_estimator == "k1" and self.kl_gradient == "value":
            yield (
                "algorithm.kl_gradient = 'value': in the loss the expected gradient of algorithm.kl_estimator = 'k1' "
                "is 0. Use 'unbiased', or algorithm.kl_place = 'reward'"
            )
        if is_in_loss and self.kl_estimator == "k2" and self.kl_gradient != "value":
            yield (
                f"algorithm.kl_gradient = '{self.kl_gradient}': algorithm.kl_estimator = 'k2' has the right "
                "gradient as it is. Use 'value'"
            )


class ClipKeys(AlgorithmConfig):
    """Keys of a clipped ratio."""

    clip_low: Coefficient = 0.2
    """The policy's ratio is clipped to 1 - clip_low ... 1 + clip_high."""
    clip_high: Coefficient = 0.2
    """See `clip_low`."""
    dual_clip: Annotated[float, Field(gt=1, le=_LARGEST)] | None = None
    """Largest ratio that counts where the advantage is negative."""


class ScoreClipKeys(AlgorithmConfig):
    """Key of algorithms that may clip a score after its baseline."""

    score_clip: Range | None = None
    """The score less its baseline, divided as the algorithm divides it, is cut at plus and minus this size."""


class GroupKeys(AlgorithmConfig):
    """Keys of algorithms that compare the responses to one prompt."""

    least_samples: ClassVar[int] = 2

    group_of_one: Literal["error", "raw", "zero"] = "error"
    """For a prompt with one response: refuse it, pass its score as it is, or give it advantage 0."""


class StdKeys(ScoreClipKeys, GroupKeys):
    """Keys of algorithms that divide by the standard deviation of a group's scores."""

    std_ddof: Degrees = 1
    """Divisor of the variance of n scores: n - std_ddof."""
    std_eps: Coefficient = 1e-6
    """Keeps the divisor from 0; see `std_on`."""
    std_on: Literal["s+eps", "max", "positive"] = "s+eps"
    """Divisor: s + std_eps; the larger of both (`max`); or s + std_eps where s > 0 and 1 elsewhere (`positive`)."""
    std_over: Literal["group", "batch", "none"] = "group"
    """Scores whose standard deviation divides: of the group, of the whole batch; `none`: nothing divides."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """`mean`: mean of the group. `leave_one_out`: mean, and with `std_over = "group"` deviation, of the others."""

    def find_contradictions(self) -> Iterator[str]:
        """Yields one line for every pair of keys that cannot go together."""
        yield from super().find_contradictions()
        if self.baseline == "leave_one_out" and self.std_over == "group" and self.std_on != "positive":
            yield (
                f"algorithm.std_on = '{self.std_on}': with algorithm.baseline = 'leave_one_out' the other responses "
                "may be equal where this one differs. Use 'positive'"
            )


class WhitenKeys(AlgorithmConfig):
    """Keys of advantages that are whitened over all trained tokens of the batch."""

    whiten: bool = True
    """Advantages get mean 0 and variance 1."""
    std_ddof: Degrees = 0
    """Divisor of the variance: the number of tokens - std_ddof."""
    std_eps: Coefficient = 1e-8
    """Number added to the variance, inside the root."""


class CriticKeys(AlgorithmConfig):
    """Keys of algorithms with a critic."""

    gamma: Share = 1.0
    """Discount per token."""
    gae_lambda: Share = 0.95
    """Lambda of generalised advantage estimation: 0 trusts the critic, 1 the rewards."""
    bootstrap: Literal["zero", "value"] = "zero"
    """Value after a response that was cut by its length: 0, or the critic's last value."""
    value_clip: Range | None = 0.2
    """Largest distance of values from the old ones; with `normalize_values`, in standard deviations of the returns."""
    normalize_values: bool = False
    """The critic learns returns less their running mean, divided by their running standard deviation."""
    critic_warmup: Annotated[int, Field(ge=0)] = 0
    """First iterations in which the critic alone is trained."""


class PreferenceKeys(AlgorithmConfig):
    """Keys of losses that compare two responses to one prompt."""

    beta: Range = 0.1
    """Strength of the tie to the reference."""
    preference_loss: Literal["dpo", "ipo"] = "dpo"
    """`dpo`: the logistic loss of the margin. `ipo`: its squared distance from 1 / (2 beta)."""

    def build_loss(self) -> PreferenceLoss:
        """Returns the loss of a batch of pairs."""
        from hf_algorithms.losses import PreferenceLoss

        return PreferenceLoss(beta=self.beta, kind=self.preference_loss)


class RewardKeys(AlgorithmConfig):
    """Keys that change scores before advantages are computed."""

    reward_clip: Range | None = None
    """Scores are cut at plus and minus this size, before anything is subtracted from them."""
    missing_eos_penalty: Coefficient | None = None
    """Number subtracted from the score of a response that was cut by its length."""


class LengthKeys(AlgorithmConfig):
    """Keys of DAPO's length term and of dynamic sampling."""

    overlong_buffer: Annotated[int, Field(ge=0)] = 0
    """Tokens before `rollout.max_new_tokens` over which the length term falls to -1; 0: no term."""
    filter_metric: str = "scores"
    """Number of a response by which dynamic sampling compares a group: `scores`, `metric_scores` (of `reward.metric`),
    `reward/NAME` (of one of `[[reward.functions]]`), `reward/model` (of `[reward.model]`), `response_tokens`, or
    another column with one number a response.
    """
    max_refills: Annotated[int, Field(ge=0)] = 3
    """Largest number of times that an iteration draws prompts again because groups with equal scores were dropped."""
