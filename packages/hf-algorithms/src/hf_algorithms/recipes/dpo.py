"""DPO: the policy learns from pairs of responses of which one is preferred (Rafailov et al. 2023), or IPO.

The loss is that of `online_dpo`, on pairs from a file. The reference is the model that training starts from.

Deviations from the paper:

- log-probs of a response are summed over all its tokens, the one that ends it included;
- the reference's log-probs are computed in every update, not once for the data set.

Each update first computes the log-probs of both responses of a pair: the loss of one depends on the other's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from hf_algorithms.recipes._config import PreferenceKeys
from hf_algorithms.recipes._recipe import Role, StepContext
from hf_algorithms.recipes._roles import ADVANTAGE, REFERENCE
from hf_algorithms.recipes._supervised import (
    GENERATOR,
    UNREAD_OF_PAIRS,
    UNUSED_BY_POLICIES,
    SupervisedConfig,
    SupervisedRecipe,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_algorithms.data import FileRows, PairRowsDataset, PreferenceRow, TurnFormat
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture, MetricsFuture

__all__ = ["DPO", "DPOConfig", "build_dataset", "evaluate", "open_pairs", "step"]


class DPOConfig(PreferenceKeys, SupervisedConfig):
    """`[algorithm]` of `hybridflow dpo`. A row is a pair of responses."""

    name: Literal["dpo"] = "dpo"


def step(roles: Roles, pairs: BatchFuture, config: DPOConfig, context: StepContext) -> Sequence[MetricsFuture]:
    """One update on a batch of pairs, each of which is two rows."""
    from hf_algorithms.losses import PreferencePairs

    del context
    batch = pairs.union(roles.reference.compute_ref_logprobs(pairs))
    batch = batch.union(roles.actor.compute_logprobs(pairs, keep_graph=True))
    batch = batch.union(roles.advantage.compute_advantages(batch, PreferencePairs()))
    return [roles.actor.update_actor(batch, config.build_loss())]


def open_pairs(
    sources: Iterable[tuple[str, float | None]],
    config: DPOConfig,
    *,
    prompt_field: str | None,
    answer_field: str | None,
) -> FileRows[PreferenceRow]:
    """Opens the pairs of a data set.

    Raises:
        DataError: as `open_preferences` does.
    """
    from hf_algorithms.data import open_preferences

    del config, answer_field
    return open_preferences(sources, prompt_field=prompt_field)


def build_dataset(
    rows: Sequence[PreferenceRow],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    source: str,
    turns: TurnFormat,
    **of_answers: Any,
) -> PairRowsDataset:
    """Returns the pairs as token ids; see `PairRowsDataset`."""
    from hf_algorithms.data import PairRowsDataset

    del of_answers
    return PairRowsDataset(rows, tokenizer, max_tokens=max_tokens, source=source, turns=turns)


def evaluate(roles: Roles, pairs: BatchFuture, num_rows: int, config: DPOConfig) -> dict[str, float]:
    """Returns the share of pairs in the right order, its 95 % interval by Wilson, and the mean margin.

    The margin is beta times the difference of the two responses' log-ratios to the reference. A pair without one counts
    as half a right one, so that the starting model has 0.5.
    """
    from hf_algorithms.evaluation.metric_summary import compute_wilson_interval
    from hf_algorithms.evaluation.validation import call_on_rows
    from hf_algorithms.losses import label_pairs

    found = pairs.union(call_on_rows(roles.group("actor"), "compute_logprobs", pairs, pairs.num_rows))
    found = found.union(call_on_rows(roles.group("reference"), "compute_ref_logprobs", pairs, pairs.num_rows))
    names = ["scores", "group_id", "response_mask", "old_logprobs", "ref_logprobs"]
    columns = found.select(names).result()
    log_ratios = label_pairs({name: columns[name] for name in names})["partner_logratio"].view(-1, 2)
    margins = config.beta * (log_ratios[:, 1] - log_ratios[:, 0])  # each row has its partner's: chosen's is second
    right = float((margins > 0).sum()) + float((margins == 0).sum()) / 2
    low, high = compute_wilson_interval(right, num_rows)
    return {
        "accuracy": right / num_rows,
        "accuracy_low": low,
        "accuracy_high": high,
        "margin": float(margins.mean()),
    }


DPO = SupervisedRecipe(
    name="dpo",
    config=DPOConfig,
    roles=(
        Role(name="actor", worker="hf_algorithms.workers:PolicyWorker", has_model=True),
        REFERENCE,
        ADVANTAGE,
    ),
    step=step,
    columns=("row_id", "prompt_ids", "response_ids", "response_mask", "group_id", "scores"),
    open_rows=open_pairs,
    build_dataset=build_dataset,
    evaluate=evaluate,
    unused=UNUSED_BY_POLICIES,
    generator=GENERATOR,
    metric="accuracy",
    unread_data=UNREAD_OF_PAIRS,
    sequences_per_row=2,
)
