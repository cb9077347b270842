"""Inputs of a run, read before anything starts: the model and three data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hf_algorithms.config import Config, DataConfig
from hf_algorithms.data import PromptDataset, Row, load_rows
from hf_algorithms.initial_model import InitialModel, build_initial_model
from hf_algorithms.role_models import find_role_models, list_main_backends
from hf_protocols.arguments import show
from hf_protocols.errors import DataError

__all__ = ["DATA_SETS", "RunInputs", "load_inputs", "load_model", "load_row_sets", "tokenize_inputs"]

DATA_SETS = ("train", "validation", "test")
"""The data sets of a run, by the names of their keys in ``[data]``."""


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """The models and the three data sets of a run."""

    model: InitialModel
    """The one of `[model]`."""
    models: Mapping[str, InitialModel]
    """Of every role that holds one, by role."""
    train: PromptDataset
    validation: PromptDataset
    test: PromptDataset

    def moved(self, before: str, after: str) -> RunInputs:
        """The same inputs, with what lies in folder ``before`` in ``after``."""

        def move(model: InitialModel) -> InitialModel:
            path, tokenizer_path = (after if each == before else each for each in (model.path, model.tokenizer_path))
            return replace(model, path=path, tokenizer_path=tokenizer_path)

        return replace(self, model=move(self.model), models={role: move(model) for role, model in self.models.items()})


def load_inputs(config: Config, directory: Path) -> RunInputs:
    """Read the data, load or make model and tokenizer; a fresh model is written to ``directory``.

    Raises:
        DataError, ConfigError: for a file that is missing or malformed.
    """
    rows = load_row_sets(config.data)
    return tokenize_inputs(config, rows, load_model(config, rows["train"], directory))


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
        backends={**list_main_backends(config), "rollout.backend": config.rollout.backend},
        on_cpu=config.cluster.gpu == "cpu",
    )


def load_row_sets(config: DataConfig) -> dict[str, list[Row]]:
    """The rows of every data set; of validation and test those that are evaluated.

    Raises:
        DataError: for a file that cannot be read, or a line of it.
    """
    return {name: _load_rows(config, name) for name in DATA_SETS}


def tokenize_inputs(config: Config, rows: dict[str, list[Row]], model: InitialModel) -> RunInputs:
    """The rows of every data set as the model's tokens, and the models of the other roles.

    Raises:
        DataError: for a prompt without tokens, with its key, file and line.
        ConfigError: for a role's own model that cannot be used.
    """
    sets = {
        name: PromptDataset(part, model.tokenizer, source=_describe_source(config.data, name))
        for name, part in rows.items()
    }
    return RunInputs(model=model, models=find_role_models(config, model), **sets)


def _describe_source(config: DataConfig, name: str) -> str:
    return f"data.{config.key_of(name)} = {show(config.path_of(name))}"


def _load_rows(config: DataConfig, name: str) -> list[Row]:
    try:
        rows = load_rows(config.path_of(name), prompt_field=config.prompt_field, answer_field=config.answer_field)
    except DataError as error:
        raise DataError(f"data.{config.key_of(name)}: {error}") from error
    return rows if name == "train" else rows[: config.max_eval_rows]
