"""Data of a configuration as its run reads them, for `hybridflow data check --config`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_algorithms.data import (
    DataReport,
    PreferenceDataset,
    choose_block_tokens,
    describe_data,
    open_preferences,
)
from hf_algorithms.preflight.inputs import (
    DATA_SETS,
    build_turn_format,
    has_pretraining_texts,
    load_model,
    load_row_sets,
)
from hf_algorithms.preflight.reward_functions import check_rewards
from hf_algorithms.preflight.row_limits import find_response_room
from hf_algorithms.recipes import SupervisedDataset, SupervisedRecipe
from hf_algorithms.run.supervised import load_supervised

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_algorithms.config import Config
    from hf_algorithms.data import PromptRows, TurnFormat

__all__ = ["LearnedReport", "describe_pair_files", "describe_run_data"]

_MOST_TEXT = 400


@dataclass(frozen=True, kw_only=True)
class LearnedReport:
    """Rows that a supervised recipe learns as they are.

    Attributes:
        source: key and value of the data set.
        rows: that the run uses.
        longest_prompt: tokens.
        longest_response: tokens.
        cut: rows that are too long and lose their start.
        notes: lines about the rows as a whole.
        first: parts of the first row as texts, special tokens included.
    """

    source: str
    rows: int
    longest_prompt: int
    longest_response: int
    cut: int
    notes: list[str]
    first: dict[str, str]

    @property
    def refusal(self) -> None:
        """None: a run takes every row that can be read."""

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON has it."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The report to read."""
        return [
            *self.notes,
            "first row",
            *(f"  {name}: {text[:_MOST_TEXT]!r}" for name, text in self.first.items()),
            f"tokens: prompts up to {self.longest_prompt:,}, responses up to {self.longest_response:,}",
        ]


def describe_run_data(
    config: Config, folder: Path, *, search_path: Sequence[str] = ()
) -> dict[str, DataReport | LearnedReport]:
    """Reads the data sets of a run and reports each under its key; one that stands in for another is reported once.

    Args:
        config: of the run.
        folder: where a fresh model and its tokenizer are written.
        search_path: folders where reward functions are looked for first.

    Raises:
        DataError, ConfigError: for what the run refuses.
    """
    if isinstance(config.recipe, SupervisedRecipe):
        inputs = load_supervised(config, folder)
        sets = {config.data.key_of(name): getattr(inputs, name) for name in reversed(DATA_SETS)}
        return {key: _describe_learned(sets[key], inputs.model.tokenizer) for key in reversed(sets)}
    rows = load_row_sets(config.data)
    has_pretraining_texts(config.data, rows)
    model = load_model(config, rows["train"], folder)
    turns = build_turn_format(config.data, model)
    context = find_response_room(config, model.shape)
    blocks = choose_block_tokens(
        config.data.block_tokens, context=model.shape.max_positions, budget=config.training.micro_batch_tokens
    )
    reports: dict[str, DataReport | LearnedReport] = {}
    for name, part in rows.items():
        key = config.data.key_of(name)
        if key in reports:
            continue
        reports[key] = describe_data(
            part,
            turns=turns,
            model_ids={"the model's generation configuration": model.end_ids},
            num_logits=model.shape.vocab_size,
            context=context,
            max_new_tokens=config.rollout.max_new_tokens,
            max_prompt_tokens=config.data.max_prompt_tokens,
            too_long=config.data.too_long,
            block_tokens=blocks,
        )
    check_rewards(config, {name: part for name, part in rows.items() if name in DATA_SETS}, search_path=search_path)
    return reports


def describe_pair_files(
    rows: PromptRows, prompt_field: str | None, *, turns: TurnFormat | None, context: int | None
) -> LearnedReport | None:
    """Reads files of preference pairs as a reward model would; None for other files, and without a tokenizer.

    Args:
        rows: the same files as prompts.
        prompt_field: as `data.prompt_field`.
        turns: how chats are written; None: no tokens are counted.
        context: tokens of a prompt and a response together; None: unknown.

    Raises:
        DataError: for the first pair that a run refuses, such as one whose sides are equal.
    """
    if any(each.columns.kind != "preferences" for each in rows.files):
        return None
    sources = [(each.path, None) for each in rows.files]
    said = {name for each in rows.files for name in each.columns.others}
    labels: Literal["reward", "cost"] = "reward" if said & {"chosen", "better_response_id"} else "cost"
    pairs = open_preferences(sources, labels=labels, prompt_field=prompt_field)
    if turns is None:
        for _ in pairs:
            pass
        return None
    source = ", ".join(each.path for each in rows.files)
    most = context or max(turns.tokenizer.model_max_length, 2)
    return _describe_learned(
        PreferenceDataset(pairs, turns.tokenizer, max_tokens=most, source=source, turns=turns), turns.tokenizer
    )


def _describe_learned(data: SupervisedDataset, tokenizer: PreTrainedTokenizerBase) -> LearnedReport:
    return LearnedReport(
        source=data.source,
        rows=len(data),
        longest_prompt=data.max_prompt_tokens,
        longest_response=data.max_response_tokens,
        cut=data.num_cut,
        notes=data.describe_rows(),
        first={name: str(tokenizer.decode(ids)) for name, ids in data.preview().items()},
    )
