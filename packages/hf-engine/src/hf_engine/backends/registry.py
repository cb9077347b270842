"""Backends by name: entry points, so that only names cross processes and nothing is imported before it is used."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, cast

from hf_protocols.errors import BackendError, BackendUnavailableError
from hf_protocols.similar_names import find_similar
from hf_protocols.validation import Checks, show

if TYPE_CHECKING:
    from hf_engine.backends.base import RolloutBackend, TrainBackend

__all__ = ["available_rollout_backends", "available_train_backends", "load_rollout_backend", "load_train_backend"]

_check = Checks(BackendError)

_TRAIN = "hf_engine.train_backends"
_ROLLOUT = "hf_engine.rollout_backends"


def available_train_backends() -> tuple[str, ...]:
    """Names of the installed training backends; imports none of them."""
    return tuple(_installed(_TRAIN))


def available_rollout_backends() -> tuple[str, ...]:
    """Names of the installed rollout backends; imports none of them."""
    return tuple(_installed(_ROLLOUT))


def load_train_backend(name: str) -> type[TrainBackend]:
    """Imports a training backend.

    Raises:
        BackendError: for a name that no distribution registers, or that two register.
        BackendUnavailableError: if its library is missing, or too old or new, with the line that installs it.
    """
    _check.name("the training backend", name)
    return cast("type[TrainBackend]", _load(_TRAIN, name))


def load_rollout_backend(name: str) -> type[RolloutBackend]:
    """Imports a rollout backend; raises as `load_train_backend` does."""
    _check.name("the rollout backend", name)
    return cast("type[RolloutBackend]", _load(_ROLLOUT, name))


def _installed(group: str) -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for entry_point in entry_points(group=group):
        claims = found.setdefault(entry_point.name, [])
        if entry_point.value not in {claim.value for claim in claims}:
            claims.append(entry_point)
    return dict(sorted(found.items()))


@cache
def _load(group: str, name: str) -> type:
    installed = _installed(group)
    if name not in installed:
        near = find_similar(name, installed)
        hint = f"Did you mean {show(near[0])}?" if near else f"Installed are {', '.join(installed) or 'none'}"
        kind = "training" if group == _TRAIN else "rollout"
        raise BackendError(f"no {kind} backend is named {show(name)}. {hint}")
    claims = installed[name]
    if len(claims) > 1:
        owners = ", ".join(f"{claim.value} of {_distribution(claim)}" for claim in claims)
        raise BackendError(f"{show(name)} in {group} is claimed by {owners}. Uninstall all but one")
    try:
        return cast("type", claims[0].load())
    except ImportError as error:
        is_missing, lacks_name = isinstance(error, ModuleNotFoundError), str(error).startswith("cannot import name")
        if error.name is None or error.name.partition(".")[0] == claims[0].module.partition(".")[0]:
            raise
        if not (is_missing or lacks_name):  # such as a shared library that does not load
            raise
        why = "which is not installed" if is_missing else f"and not the version that is installed ({error})"
        raise BackendUnavailableError(
            f"backend {show(name)} needs {error.name}, {why}: {_install_line(claims[0], error.name)}"
        ) from error


def _install_line(claim: EntryPoint, missing: str) -> str:
    """Installs the missing library in the versions that the backend's distribution declares."""
    library = missing.partition(".")[0]
    declared = claim.dist.requires if claim.dist is not None else None
    requirements = (requirement.partition(";")[0].strip() for requirement in declared or ())
    wanted = next((r for r in requirements if r.replace("-", "_").startswith(library)), library)
    return f'pip install "{wanted}"'


def _distribution(claim: EntryPoint) -> str:
    return claim.dist.name if claim.dist is not None else "an unknown distribution"
