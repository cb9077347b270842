"""Low-rank adapters in a run: what they are checked for, where they come from, and which roles share their base."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hf_algorithms.roles import least_rows
from hf_engine import SupportsAdapterCheck, load_train_backend, merge_adapter
from hf_engine.model_directory import is_adapter, read_model_directory
from hf_protocols import BackendError, ConfigError
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_algorithms.config import Config
    from hf_algorithms.models.initial_model import Head, InitialModel
    from hf_algorithms.preflight.inputs import ModelInputs
    from hf_algorithms.roles import Roles
    from hf_algorithms.run_directory import RunDirectory
    from hf_controller import BatchFuture, WorkerGroup
    from hf_engine import SamplingParams

__all__ = [
    "MERGED_MODELS",
    "check_adapters",
    "export_trained",
    "keep_merged_models",
    "merge_given_adapters",
    "probe_sampler",
]

Inputs = TypeVar("Inputs", bound="ModelInputs")

_NUM_PROBED = 4
"""Prompts whose responses show that the sampler has the adapters."""
MERGED_MODELS = "merged_models"
"""Folder of a run with the whole models made of the adapters that it was given."""


def merge_given_adapters(config: Config, folder: Path) -> Config:
    """Returns the configuration with a whole model in place of every adapter that a path names.

    Args:
        config: the run's.
        folder: where the whole models are written, one for each adapter.

    Raises:
        ConfigError: for an adapter without its base, naming the key.
    """
    merged: dict[str, str] = {}

    def find(key: str, path: str | None) -> str | None:
        if path is None or not is_adapter(path):
            return path
        if path not in merged:
            target = folder / (key.removesuffix(".path").replace(".", "_"))
            merge_adapter(path, target, label=f"{key} = {show(path)}")
            merged[path] = str(target)
        return merged[path]

    model = _with_path(config.model, find("model.path", config.model.path))
    roles = {name: _with_path(role, find(f"roles.{name}.path", role.path)) for name, role in config.roles.items()}
    changed: dict[str, Any] = {"model": model, "roles": roles}
    for section in ("reward", "cost"):
        part = getattr(config, section)
        if part.model is not None:
            scorer = _with_path(part.model, find(f"{section}.model.path", part.model.path))
            changed[section] = part.model_copy(update={"model": scorer})
    return config.model_copy(update=changed) if merged else config


def export_trained(group: WorkerGroup, config: Config, folder: Path, *, base: str) -> list[Path]:
    """Writes what a role has learned: its model; with `[model.lora]` the adapter, and the model if that is asked for.

    Args:
        group: of the role.
        config: the run's.
        folder: where to write.
        base: directory or hub name of the model that the adapter belongs to.

    Returns:
        The folders that hold a whole model or an adapter.
    """
    lora, dtype = config.model.lora, config.model.export_dtype
    if lora is None:
        group.export_model(str(folder), dtype=dtype).result()
        return [folder]
    group.export_adapter(str(folder), base=base).result()
    if not lora.save_merged:
        return [folder]
    group.export_model(str(folder / "merged"), dtype=dtype).result()
    return [folder, folder / "merged"]


def keep_merged_models(directory: RunDirectory, inputs: Inputs, folder: Path) -> Inputs:
    """Moves what `merge_given_adapters` wrote into the run's directory, and has the inputs name it there."""
    if not folder.exists():
        return inputs
    with directory.replacing(MERGED_MODELS) as fresh:
        shutil.move(folder, fresh)
    for each in (directory.path / MERGED_MODELS).iterdir():
        inputs = inputs.moved(str(folder / each.name), str(each))
    return inputs


def probe_sampler(config: Config, roles: Roles, prompts: BatchFuture, sampling: SamplingParams) -> None:
    """Proves that the policy generates with the adapters of `[model.lora]`, if there are any.

    Raises:
        ReshardError: where it does not.
    """
    if config.model.lora is None:
        return
    policy = roles.having("generate_sequences")
    num_rows = max(_NUM_PROBED, least_rows(policy, "probe_adapters"))
    policy.probe_adapters(prompts.rows([row % prompts.num_rows for row in range(num_rows)]), sampling).result()


def check_adapters(config: Config, models: Mapping[str, InitialModel]) -> None:
    """Refuses `[model.lora]` where a role that learns cannot have such adapters.

    Args:
        config: the run's.
        models: of the roles that hold one, by role.

    Raises:
        ConfigError: for a backend that trains whole weights only, targets that a model lacks, or without peft.
    """
    lora = config.model.lora
    if lora is None:
        return
    if problems := list(dict.fromkeys(_find_problems(config, models))):
        raise ConfigError("\n".join(problems))


def _find_problems(config: Config, models: Mapping[str, InitialModel]) -> Iterator[str]:
    assert config.model.lora is not None, "asked by check_adapters"
    checked = set()
    try:
        given = config.model.lora.for_engine()
    except ConfigError as error:
        yield f"model.lora.{error}"
        return
    for role in config.recipe.model_roles:
        worker = config.recipe.role(role).load_worker()
        if not getattr(worker, "trainable", True):
            continue
        (key, name), head = config.train_backend(role), cast("Head", getattr(worker, "head", "lm"))
        backend = load_train_backend(name)
        if not issubclass(backend, SupportsAdapterCheck):
            yield f"{key} = {show(name)}: it trains whole weights only, not [model.lora]. Set it to 'fsdp'"
            continue
        path = models[role].path
        if (path, head) in checked:
            continue
        checked.add((path, head))
        try:
            files = read_model_directory(path, label="model.lora", needs_weights=False)
            backend.check_adapters(files, given, head=head)
        except BackendError as error:
            reason = str(error).removeprefix("model.lora: ")
            yield f"model.lora.{reason}" if reason.startswith("targets=") else f"model.lora: {reason}"


def _with_path(section: Any, path: str | None) -> Any:
    return section if path == section.path else section.model_copy(update={"path": path})
