"""Reward models and cost models, learned from pairs of responses of which one is preferred.

`[algorithm] labels = "reward"` maximises the likelihood of Bradley and Terry (1952), `-log sigmoid(chosen - rejected)`.
`labels = "cost"` is the cost model of Safe-RLHF (Dai et al. 2023): the less safe response costs more, and costs are
above 0 for unsafe responses and below 0 for safe ones.

Deviations from Stiennon et al. (2020) and from the code of Safe-RLHF:

- scores are not normalised after training;
- the head starts at 0, so that the first loss is log 2 a pair;
- dropout and margins between pairs are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from hf_algorithms.recipes._config import Coefficient
from hf_algorithms.recipes._recipe import Role, StepContext
from hf_algorithms.recipes._supervised import UNREAD_OF_PAIRS, SupervisedConfig, SupervisedRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_algorithms.data import FileRows, PreferenceDataset, PreferenceRow, TurnFormat
    from hf_algorithms.losses import CostRankingLoss, RankingLoss
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture, MetricsFuture

__all__ = ["REWARD_MODEL_TRAINING", "RewardModelConfig", "build_dataset", "evaluate", "open_pairs", "step"]


class RewardModelConfig(SupervisedConfig):
    """`[algorithm]` of `hybridflow reward-model`. A row is a pair of responses."""

    name: Literal["reward_model"] = "reward_model"
    labels: Literal["reward", "cost"] = "reward"
    """`reward`: the better of two responses. `cost`: the safer one, and whether each is safe."""
    regularization: Coefficient | None = None
    """Weight of the mean square of the scores; by default 0, and 0.001 of costs."""

    def build_loss(self) -> RankingLoss | CostRankingLoss:
        """Returns the loss of a batch of pairs."""
        from hf_algorithms.losses import CostRankingLoss, RankingLoss

        kind: Any = CostRankingLoss if self.labels == "cost" else RankingLoss
        loss: RankingLoss | CostRankingLoss = (
            kind() if self.regularization is None else kind(regularization=self.regularization)
        )
        return loss


def step(roles: Roles, pairs: BatchFuture, config: RewardModelConfig, context: StepContext) -> Sequence[MetricsFuture]:
    """One update on a batch of pairs."""
    del context
    return [roles.reward_model.update_scores(pairs, config.build_loss())]


def open_pairs(
    sources: Iterable[tuple[str, float | None]],
    config: RewardModelConfig,
    *,
    prompt_field: str | None,
    answer_field: str | None,
) -> FileRows[PreferenceRow]:
    """Opens the pairs of a data set.

    Raises:
        DataError: as `open_preferences` does.
    """
    from hf_algorithms.data import open_preferences

    del answer_field
    return open_preferences(sources, labels=config.labels, prompt_field=prompt_field)


def build_dataset(
    rows: Sequence[PreferenceRow],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    source: str,
    turns: TurnFormat,
    **of_answers: Any,
) -> PreferenceDataset:
    """Returns the pairs as token ids; see `PreferenceDataset`."""
    from hf_algorithms.data import PreferenceDataset

    del of_answers
    return PreferenceDataset(rows, tokenizer, max_tokens=max_tokens, source=source, turns=turns)


def evaluate(roles: Roles, pairs: BatchFuture, num_rows: int, config: RewardModelConfig) -> dict[str, float]:
    """Returns the share of pairs in the right order, its 95 % interval by Wilson, and the mean difference.

    A pair of equal scores counts as half a right one. With `labels = "cost"` also the share of costs of the right sign.
    """
    from hf_algorithms.evaluation.metric_summary import compute_wilson_interval
    from hf_algorithms.evaluation.validation import call_on_rows

    found = call_on_rows(roles.group("reward_model"), "score_pairs", pairs, num_rows).result()["scores"].double()
    margins = found[:, 0] - found[:, 1]
    if config.labels == "cost":
        margins = -margins
    right = float((margins > 0).sum()) + float((margins == 0).sum()) / 2
    low, high = compute_wilson_interval(right, num_rows)
    numbers = {
        "accuracy": right / num_rows,
        "accuracy_low": low,
        "accuracy_high": high,
        "margin": float(margins.mean()),
    }
    if config.labels == "cost":
        signs = pairs.select(["signs"]).result()["signs"]
        numbers["sign_accuracy"] = float((signs * found > 0).double().mean())
    return numbers


REWARD_MODEL_TRAINING = SupervisedRecipe(
    name="reward_model",
    config=RewardModelConfig,
    roles=(Role(name="reward_model", worker="hf_algorithms.workers:PairScorer", has_model=True),),
    step=step,
    columns=("row_id", "prompt_ids", "response_ids", "rejected_ids", "signs"),
    open_rows=open_pairs,
    build_dataset=build_dataset,
    evaluate=evaluate,
    metric="accuracy",
    unread_data=UNREAD_OF_PAIRS,
    sequences_per_row=2,
)
