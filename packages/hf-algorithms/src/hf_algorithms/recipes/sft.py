"""Supervised fine-tuning: the model learns the answers of rows, as prompts with answers, chats or texts.

The loss is the mean of -log-prob over the trained tokens of the whole batch, however its rows are split: over all ranks
and micro-batches. Trained are an answer's tokens and the one that ends it; of a chat those of every message of the
assistant; of a text all.

Deviations from common practice: rows are not joined to longer ones, and training is counted in iterations, not epochs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from hf_algorithms.recipes._recipe import Role, StepContext
from hf_algorithms.recipes._supervised import (
    GENERATOR,
    UNUSED_BY_POLICIES,
    SupervisedConfig,
    SupervisedRecipe,
)
from hf_protocols.errors import ConfigError, DataError
from hf_protocols.validation import show

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_algorithms.data import AnswerDataset, Kind, LearnedBlocks, PromptRows, TooLong, TurnFormat
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture, MetricsFuture

__all__ = ["SFT", "SFTConfig", "build_dataset", "evaluate", "open_answers", "step"]

_LARGEST_EXPONENT = 700.0
"""exp of more overflows."""
_PROMPTLESS: tuple[Kind, ...] = ("texts",)


class SFTConfig(SupervisedConfig):
    """`[algorithm]` of `hybridflow sft`. A row is a prompt with its answer, a chat, or a block of text."""

    name: Literal["sft"] = "sft"


def step(roles: Roles, rows: BatchFuture, config: SFTConfig, context: StepContext) -> Sequence[MetricsFuture]:
    """One update on a batch of rows."""
    from hf_algorithms.losses import SupervisedLoss

    del config, context
    return [roles.actor.update_actor(rows, SupervisedLoss())]


def open_answers(
    sources: Sequence[tuple[str, float | None]],
    config: SFTConfig,
    *,
    prompt_field: str | None,
    answer_field: str | None,
) -> PromptRows:
    """Opens the rows of a data set.

    Raises:
        DataError: as `open_rows` does, and for preference pairs or files of two kinds.
    """
    from hf_algorithms.data import open_rows

    del config
    rows = open_rows(
        sources, prompt_field=prompt_field, answer_field=answer_field, promptless=_PROMPTLESS, is_learned=True
    )
    kinds = {file.columns.kind: file.path for file in rows.files}
    if "preferences" in kinds and answer_field is None:
        raise DataError(
            f"{kinds['preferences']} has two responses to a prompt, of which one is preferred. Use `hybridflow dpo`, "
            "or set data.answer_field to the column to learn"
        )
    if "texts" in kinds and len(kinds) > 1:
        other = next(path for kind, path in kinds.items() if kind != "texts")
        raise DataError(f"{kinds['texts']} has texts, {other} prompts. Name files of one kind")
    return rows


def build_dataset(
    rows: PromptRows,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    source: str,
    turns: TurnFormat,
    budget_tokens: int,
    block_tokens: int | None,
    too_long: TooLong,
) -> AnswerDataset | LearnedBlocks:
    """Returns the rows as token ids; see `AnswerDataset`, and `LearnedBlocks` for texts.

    Raises:
        ConfigError: for a length of blocks without texts, or above a forward pass.
    """
    from hf_algorithms.data import AnswerDataset, LearnedBlocks, choose_block_tokens

    if rows.files[0].columns.kind == "texts":
        size = choose_block_tokens(block_tokens, context=max_tokens, budget=budget_tokens)
        return LearnedBlocks(rows, turns, block_tokens=size, source=source)
    if block_tokens is not None:
        raise ConfigError(
            f"data.block_tokens = {show(block_tokens)}: {source} has no texts, and only texts are split into "
            "blocks. Remove the key"
        )
    if too_long != "error":  # otherwise what a forward pass has no room for is refused, with the key to raise
        max_tokens = min(max_tokens, budget_tokens)
    return AnswerDataset(rows, tokenizer, max_tokens=max_tokens, source=source, turns=turns, too_long=too_long)


def evaluate(roles: Roles, rows: BatchFuture, num_rows: int, config: SFTConfig) -> dict[str, float]:
    """Returns the mean of -log-prob over the trained tokens of all rows, and its exponential, the perplexity."""
    from hf_algorithms.evaluation.validation import call_on_rows

    del config
    found = rows.union(call_on_rows(roles.group("actor"), "compute_logprobs", rows, num_rows))
    columns = found.select(["response_mask", "old_logprobs"]).result()
    is_trained = columns["response_mask"].values()
    loss = -float(columns["old_logprobs"].values().double()[is_trained].mean())
    return {"loss": loss, "perplexity": math.exp(min(loss, _LARGEST_EXPONENT))}


SFT = SupervisedRecipe(
    name="sft",
    config=SFTConfig,
    roles=(Role(name="actor", worker="hf_algorithms.workers:PolicyWorker", has_model=True),),
    step=step,
    columns=("row_id", "prompt_ids", "response_ids", "response_mask"),
    open_rows=open_answers,
    build_dataset=build_dataset,
    evaluate=evaluate,
    unused=UNUSED_BY_POLICIES,
    unread_data=("max_prompt_tokens", "pretraining"),
    generator=GENERATOR,
    metric="loss",
    lower_is_better=True,
    defaults=MappingProxyType({"optimizer.actor_learning_rate": 1e-5}),
)
