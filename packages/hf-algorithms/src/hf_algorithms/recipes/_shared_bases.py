"""Roles that need no model of their own where a policy trains adapters: the policy answers with its adapters off."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hf_algorithms.recipes._recipe import Recipe, Role

__all__ = ["share_bases"]


def share_bases(recipe: Recipe, kept: Collection[str]) -> Recipe:
    """Returns the recipe without the frozen roles whose model is the base of another role's adapters.

    A role goes if its worker has `base_methods`, and it starts from a role whose worker has the methods named there.

    Args:
        recipe: of a run with `[model.lora]`.
        kept: roles with a model of their own, such as those that the configuration gives a path.
    """
    owners = {role.name: owner for role in recipe.roles if (owner := _find_owner(recipe, role)) is not None}
    shared = {name: owner for name, owner in owners.items() if name not in kept}
    roles = tuple(role for role in recipe.roles if role.name not in shared)
    played = {
        name: (owner, getattr(recipe.role(name).load_worker(), "base_methods", {})) for name, owner in shared.items()
    }
    return replace(recipe, roles=roles, played=played) if shared else recipe


def _find_owner(recipe: Recipe, role: Role) -> str | None:
    """The role with the adapters whose base this role is."""
    methods = getattr(role.load_worker(), "base_methods", {}) if role.has_model else {}
    source = next((each for each in recipe.roles if each.name == role.starts_from), None)
    if not methods or source is None or not source.has_model:
        return None
    worker = source.load_worker()
    has_all = all(hasattr(worker, method) for method in methods.values())
    return source.name if has_all and getattr(worker, "trainable", True) else None
