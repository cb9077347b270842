"""Inputs of a run, read before anything starts: the model and its data sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hf_algorithms.config import Config, DataConfig
from hf_algorithms.data import (
    Kind,
    PromptDataset,
    PromptRows,
    TextBlocks,
    TurnFormat,
    choose_block_tokens,
    open_rows,
    read_template,
)
from hf_algorithms.models.initial_model import InitialModel, build_initial_model
from hf_algorithms.models.role_models import find_role_models, list_main_backends
from hf_algorithms.preflight.row_limits import find_prompt_room
from hf_protocols.errors import ConfigError, DataError

if TYPE_CHECKING:
    from hf_algorithms.preflight.evaluation_sets import EvaluationInputs

__all__ = [
    "DATA_SETS",
    "ModelInputs",
    "RunInputs",
    "build_turn_format",
    "has_pretraining_texts",
    "load_inputs",
    "load_model",
    "load_row_sets",
    "tokenize_inputs",
]

_NO_KIND: tuple[Kind, ...] = ()
DATA_SETS = ("train", "validation", "test")
"""The data sets of a run, by the names of their keys in `[data]`."""
_TEMPLATE = "chat_template.jinja"
"""File that transformers prefers to a template in tokenizer_config.json."""


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """The models of a run."""

    model: InitialModel
    """The one of `[model]`."""
    models: Mapping[str, InitialModel]
    """Of every role that holds one, by role."""
    stop_ids: tuple[int, ...]
    """Tokens at which responses end; none where nothing is generated."""
    turns: TurnFormat
    """Format in which prompts and responses are written as tokens."""
    evaluations: tuple[EvaluationInputs, ...] = ()
    """The sets of `[[evaluation]]`."""

    def exported_files(self) -> dict[str, bytes]:
        """The tokenizer's files by name, with the template of `data.chat_template` in place of its own."""
        template = self.turns.own_template
        return {**self.model.tokenizer_files, **({} if template is None else {_TEMPLATE: template.encode()})}

    def moved(self, before: str, after: str) -> Self:
        """The same inputs, with what lies in folder `before` in `after`."""

        def move(model: InitialModel) -> InitialModel:
            kept = (model.path, model.tokenizer_path, model.own_tokenizer_path)
            path, tokenizer_path, own = (after if each == before else each for each in kept)
            return replace(model, path=path or "", tokenizer_path=tokenizer_path or "", own_tokenizer_path=own)

        return replace(self, model=move(self.model), models={role: move(model) for role, model in self.models.items()})


@dataclass(frozen=True, kw_only=True)
class RunInputs(ModelInputs):
    """The models and the data sets of a run."""

    train: PromptDataset
    validation: PromptDataset
    test: PromptDataset
    pretraining: PromptDataset | TextBlocks | None = None
    """Rows of the pretraining loss; None: the rows of `train`."""

    def describe_data(self) -> list[str]:
        """A line for each file with its format and columns, one for absent answers, mixed and long prompts each."""
        lines: list[str] = []
        sets: list[PromptDataset | TextBlocks] = [self.train, self.validation, self.test]
        sets += [each.data for each in self.evaluations]
        for data in sets if self.pretraining is None else [*sets, self.pretraining]:
            if isinstance(data.rows, PromptRows):
                key = data.source.partition(" = ")[0]
                lines += [f"{key}: {each.describe()}" for each in data.rows.files]
                if any(each.columns.kind == "preferences" for each in data.rows.files):
                    lines.append(f"{key}: responses of pairs are not read; `hybridflow dpo` trains on them")
            if isinstance(data, TextBlocks):
                lines.append(data.describe())
            else:
                lines += filter(None, [data.describe_unanswered(), data.describe_mixture(), data.describe_too_long()])
        return list(dict.fromkeys(lines))

    def describe_draws(self, config: Config) -> list[str]:
        """A line where an iteration needs more prompts than there are rows."""
        rows, batch = len(self.train), config.rollout.batch_size
        if rows >= batch:
            return []
        return [f"data.train: {rows} rows: an iteration of rollout.batch_size = {batch} draws rows more than once"]


def load_inputs(config: Config, directory: Path) -> RunInputs:
    """Reads the data, loads or makes model and tokenizer; a fresh model is written to `directory`.

    Raises:
        DataError, ConfigError: for a file that is missing or malformed.
    """
    rows = load_row_sets(config.data)
    return tokenize_inputs(config, rows, load_model(config, rows["train"], directory))


def load_model(config: Config, rows: PromptRows, directory: Path) -> InitialModel:
    """The model, checked for both backends; a fresh one of the training `rows` is written to `directory`.

    Raises:
        ConfigError: for files that are missing or damaged, or that a backend cannot run.
    """
    return build_initial_model(
        config.model,
        rows,
        directory=directory,
        seed=config.run.seed,
        backends={**list_main_backends(config), "rollout.backend": config.rollout.backend},
        rollout_options=config.rollout.options,
        on_cpu=config.cluster.gpu == "cpu",
    )


def load_row_sets(config: DataConfig) -> dict[str, PromptRows]:
    """The rows of every data set, each of them read once; of validation and test those that are evaluated.

    `pretraining` is among them if the configuration names it.

    Raises:
        DataError: for a file that cannot be read, or a line of it.
    """
    opened: dict[str, PromptRows] = {}
    for name in (*DATA_SETS, *(["pretraining"] if config.pretraining is not None else [])):
        key = config.key_of(name)
        if key not in opened:
            opened[key] = _open_rows(config, name)
    sets = {name: opened[config.key_of(name)] for name in DATA_SETS}
    sets = {name: rows if name == "train" else rows.first(config.max_eval_rows) for name, rows in sets.items()}
    if config.pretraining is not None:
        sets["pretraining"] = opened["pretraining"]
    return sets


def tokenize_inputs(config: Config, rows: dict[str, PromptRows], model: InitialModel) -> RunInputs:
    """The rows of every data set as the model's tokens, and the models of the other roles.

    Raises:
        DataError: for a prompt without tokens, with its key, file and line.
        ConfigError: for a role's own model that cannot be used, and a chat template that cannot be read.
    """
    turns = build_turn_format(config.data, model)
    bound = find_prompt_room(config, model.shape)
    has_texts = has_pretraining_texts(config.data, rows)
    sets: dict[str, Any] = {
        name: PromptDataset(
            part,
            model.tokenizer,
            turns=turns,
            source=config.data.describe(name),
            max_prompt_tokens=bound,
            too_long=config.data.too_long,
        )
        for name, part in rows.items()
        if name != "pretraining" or not has_texts
    }
    if has_texts:
        sets["pretraining"] = TextBlocks(
            rows["pretraining"],
            turns,
            block_tokens=choose_block_tokens(
                config.data.block_tokens,
                context=model.shape.max_positions,
                budget=config.training.micro_batch_tokens,
            ),
            source=config.data.describe("pretraining"),
        )
    models = find_role_models(config, model)
    policies = [role for role in models if hasattr(config.recipe.role(role).load_worker(), "generate_sequences")]
    ends = {token_id for role in policies for token_id in models[role].end_ids}
    return RunInputs(model=model, models=models, turns=turns, stop_ids=turns.list_stop_ids(ends), **sets)


def build_turn_format(config: DataConfig, model: InitialModel) -> TurnFormat:
    """The chat template of `[data]`, or else the tokenizer's own.

    Raises:
        ConfigError: for a template that cannot be read or parsed.
    """
    return TurnFormat(
        model.tokenizer,
        template=None if config.chat_template is None else read_template(config.chat_template),
        options=config.template_options,
        system_prompt=config.system_prompt,
        label=model.label,
    )


def has_pretraining_texts(config: DataConfig, rows: Mapping[str, PromptRows]) -> bool:
    """True if `data.pretraining` has texts, which are split into blocks; False for prompts with answers.

    Raises:
        DataError: for files of both kinds.
        ConfigError: for a length of blocks without texts.
    """
    files = rows["pretraining"].files if "pretraining" in rows else ()
    texts = {file.path: file.columns.kind == "texts" for file in files}
    if config.block_tokens is not None and not any(texts.values()):
        raise ConfigError(
            f"data.block_tokens = {config.block_tokens}: data.pretraining names no texts, and only texts are split "
            "into blocks. Remove the key"
        )
    if len(set(texts.values())) > 1:
        first, other = (next(path for path, found in texts.items() if found is kind) for kind in (True, False))
        raise DataError(f"{config.describe('pretraining')}: {first} has texts, {other} prompts. Name files of one kind")
    return any(texts.values())


def _open_rows(config: DataConfig, name: str) -> PromptRows:
    """Opens a data set and reads every row of it once, to find what is wrong with any."""
    key = config.key_of(name)
    is_own = name == "pretraining"
    try:
        rows = open_rows(
            config.sources_of(name),
            prompt_field=None if is_own else config.prompt_field,
            answer_field=None if is_own else config.answer_field,
            promptless=("texts",) if is_own else _NO_KIND,
        )
        for _ in rows if key == "train" or is_own else rows.first(config.max_eval_rows):
            pass
    except DataError as error:
        raise DataError(f"data.{key}: {error}") from error
    return rows
