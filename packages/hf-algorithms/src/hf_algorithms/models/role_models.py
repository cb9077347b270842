"""The model that each role starts from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hf_algorithms.data import read_template
from hf_algorithms.models.initial_model import Head, InitialModel, read_role_model
from hf_protocols import ConfigError
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_algorithms.config import Config

__all__ = ["describe_generic_shapes", "find_role_models", "list_main_backends"]


def find_role_models(config: Config, model: InitialModel) -> dict[str, InitialModel]:
    """Returns the model of every role that holds one, by role.

    `[roles.NAME] path` comes first, then what the recipe declares in `starts_from`, then `model`, the one of `[model]`.

    Raises:
        ConfigError: for a directory that cannot be used by its role, with the key that names it; for a key of
            `[algorithm]` that does not fit these models.
    """
    found: dict[str, InitialModel] = {}
    waiting = list(config.recipe.model_roles)
    sections = {scorer: section for section, scorer in config.recipe.scorers.items()}
    while waiting:
        name = waiting.pop(0)
        path, source = config.role(name).path, config.recipe.role(name).starts_from
        if path is not None:
            found[name] = _read(config, name, path, model, f"roles.{name}.path = {show(path)}")
        elif source is None:
            found[name] = model
        elif name in sections:
            found[name] = _read(config, name, str(source), model, f"{sections[name]}.model.path = {show(source)}")
        elif source in found:
            found[name] = found[source]
        elif source in waiting:
            waiting.append(name)
        else:
            found[name] = _read(config, name, source, model, f"starts_from = {show(source)} of role {show(name)}")
    shapes = {name: each.shape for name, each in found.items()}
    if misfits := list(config.algorithm.find_misfits(shapes)):
        raise ConfigError("\n".join(misfits))
    return found


def describe_generic_shapes(models: Mapping[str, InitialModel]) -> list[str]:
    """Returns one line for every family of which the mapper knows names and sizes only, for the user.

    Args:
        models: of every role that holds one, by role.
    """
    roles: dict[str, list[str]] = {}
    for role, model in models.items():
        if model.shape.is_generic:
            roles.setdefault(model.shape.family, []).append(role)
    return [
        f"{', '.join(names)}: planned with a generic shape, the sizes of the {family} that transformers builds"
        for family, names in roles.items()
    ]


def list_main_backends(config: Config) -> dict[str, str]:
    """Returns the training backends of the roles that start from the model of `[model]`, by key."""
    found = {}
    for name in config.recipe.model_roles:
        role = name
        while config.role(role).path is None and config.recipe.role(role).starts_from in config.recipe.model_roles:
            role = str(config.recipe.role(role).starts_from)
        if config.role(role).path is None and config.recipe.role(role).starts_from is None:
            key, backend = config.train_backend(name)
            found[key] = backend
    return found


def _read(config: Config, name: str, path: str, model: InitialModel, label: str) -> InitialModel:
    backends, worker = dict([config.train_backend(name)]), config.recipe.role(name).load_worker()
    if hasattr(worker, "generate_sequences"):
        backends["rollout.backend"] = config.rollout.backend
    head: Head = getattr(worker, "head", "lm")
    template = None if config.data.chat_template is None else read_template(config.data.chat_template)
    return read_role_model(
        path,
        model,
        label=label,
        backends=backends,
        rollout_options=config.rollout.options,
        on_cpu=config.cluster.gpu == "cpu",
        head=head,
        template=template,
    )
