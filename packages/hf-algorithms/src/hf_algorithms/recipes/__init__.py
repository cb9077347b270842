"""Recipes: each a configuration and a step that reads like the paper.

A recipe is a single-process program over roles. ``RECIPES`` maps the names of ``[algorithm] name`` to them; a
recipe of your own is a :class:`Recipe` object.
"""

from __future__ import annotations

from hf_algorithms.recipes._recipe import Recipe, mini_batch_rows
from hf_algorithms.recipes.ppo import PPO, PPOConfig

__all__ = ["RECIPES", "AlgorithmConfig", "PPOConfig", "Recipe", "mini_batch_rows"]

AlgorithmConfig = PPOConfig
"""Any recipe's configuration."""

RECIPES = {PPO.name: PPO}
"""The recipes by the name that ``[algorithm] name`` gives."""
