"""Recipes: each a configuration, roles, and a step that reads like the paper.

A recipe is a single-process program over roles. `RECIPES` maps the names of `[algorithm] name` to the shipped ones.
Your own is a `Recipe` object, which `[algorithm] recipe = "module:RECIPE"` names.
"""

from __future__ import annotations

from hf_algorithms.recipes._config import AlgorithmConfig
from hf_algorithms.recipes._load import load_recipe
from hf_algorithms.recipes._recipe import Recipe, Role, StepContext, mini_batch_rows
from hf_algorithms.recipes._roles import ACTOR, ADVANTAGE, CRITIC, REFERENCE, REWARD
from hf_algorithms.recipes.ppo import PPO, PPOConfig

__all__ = [
    "ACTOR",
    "ADVANTAGE",
    "CRITIC",
    "RECIPES",
    "REFERENCE",
    "REWARD",
    "AlgorithmConfig",
    "PPOConfig",
    "Recipe",
    "Role",
    "StepContext",
    "load_recipe",
    "mini_batch_rows",
]

RECIPES = {recipe.name: recipe for recipe in (PPO,)}
"""The shipped recipes by the name that `[algorithm] name` gives."""
