"""Inputs of a run, read before anything starts: the model and three data sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hf_algorithms.config import Config, DataConfig
from hf_algorithms.data import PromptDataset, Row, load_rows
from hf_algorithms.initial_model import InitialModel, build_initial_model
from hf_protocols.arguments import show
from hf_protocols.errors import DataError

__all__ = ["DATA_SETS", "RunInputs", "load_inputs", "load_model", "load_row_sets", "tokenize_inputs"]

DATA_SETS = ("train", "validation", "test")
"""The data sets of a run, by the names of their keys in ``[data]``."""


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """The model and the three data sets of a run."""

    model: InitialModel
    train: PromptDataset
    validation: PromptDataset
    test: PromptDataset

    def moved(self, before: str, after: str) -> RunInputs:
        """The same inputs, with what lies in folder ``before`` in ``after``."""
        old = self.model
        path, tokenizer_path = (after if each == before else each for each in (old.path, old.tokenizer_path))
        return replace(self, model=replace(old, path=path, tokenizer_path=tokenizer_path))


def load_inputs(config: Config, directory: Path) -> RunInputs:
    """Read the data, load or make model and tokenizer; a fresh model is written to ``directory``.

    Raises:
        DataError, ConfigError: for a file that is missing or malformed.
    """
    rows = load_row_sets(config.data)
    return tokenize_inputs(config.data, rows, load_model(config, rows["train"], directory))


def load_model(config: Config, rows: Sequence[Row], directory: Path) -> InitialModel:
    """The model, checked for both backends; a fresh one of the training ``rows`` is written to ``directory``.

    Raises:
        ConfigError: for files that are missing or damaged, or that a backend cannot run.
    """
    return build_initial_model(
        config.model,
        rows,
        directory=directory,
        seed=config.run.seed,
        backends={"training.backend": config.training.backend, "rollout.backend": config.rollout.backend},
        on_cpu=config.cluster.gpu == "cpu",
    )


def load_row_sets(config: DataConfig) -> dict[str, list[Row]]:
    """The rows of every data set; of validation and test those that are evaluated.

    Raises:
        DataError: for a file that cannot be read, or a line of it.
    """
    return {name: _load_rows(config, name) for name in DATA_SETS}


def tokenize_inputs(config: DataConfig, rows: dict[str, list[Row]], model: InitialModel) -> RunInputs:
    """The rows of every data set as the model's tokens.

    Raises:
        DataError: for a prompt without tokens, with its key, file and line.
    """
    sets = {
        name: PromptDataset(part, model.tokenizer, source=_describe_source(config, name)) for name, part in rows.items()
    }
    return RunInputs(model=model, **sets)


def _describe_source(config: DataConfig, name: str) -> str:
    return f"data.{config.key_of(name)} = {show(config.path_of(name))}"


def _load_rows(config: DataConfig, name: str) -> list[Row]:
    try:
        rows = load_rows(config.path_of(name), prompt_field=config.prompt_field, answer_field=config.answer_field)
    except DataError as error:
        raise DataError(f"data.{config.key_of(name)}: {error}") from error
    return rows if name == "train" else rows[: config.max_eval_rows]
