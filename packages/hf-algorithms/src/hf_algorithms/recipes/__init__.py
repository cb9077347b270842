"""Recipes: each a configuration, roles, and a step that reads like the paper.

A recipe is a single-process program over roles. `RECIPES` maps the names of `[algorithm] name` to the shipped ones.
Your own is a `Recipe` object, which `[algorithm] recipe = "module:RECIPE"` names.
What must not live here: processes, devices, backends, and the formula of a loss or an advantage.
"""

from __future__ import annotations

from hf_algorithms.recipes._config import (
    AlgorithmConfig,
    ClipKeys,
    CriticKeys,
    GroupKeys,
    PolicyConfig,
    StdKeys,
    WhitenKeys,
)
from hf_algorithms.recipes._load import load_recipe
from hf_algorithms.recipes._recipe import (
    Recipe,
    Role,
    StepContext,
    StepError,
    mini_batch_rows,
)
from hf_algorithms.recipes._roles import (
    ACTOR,
    ADVANTAGE,
    COST_MODEL,
    CRITIC,
    POLICY_ROLES,
    REFERENCE,
    REWARD,
    REWARD_MODEL,
)
from hf_algorithms.recipes._shared_bases import share_bases
from hf_algorithms.recipes._steps import (
    add_old_logprobs,
    add_ref_logprobs,
    build_clip,
    generate,
    generate_scored,
    train_by_scores,
    update_policy,
)
from hf_algorithms.recipes._supervised import SupervisedConfig, SupervisedDataset, SupervisedRecipe
from hf_algorithms.recipes.cispo import CISPO
from hf_algorithms.recipes.dapo import DAPO
from hf_algorithms.recipes.distillation import DISTILLATION
from hf_algorithms.recipes.dpo import DPO, DPOConfig
from hf_algorithms.recipes.dppo_tv import DPPO_TV
from hf_algorithms.recipes.dr_grpo import DR_GRPO
from hf_algorithms.recipes.gmpo import GMPO
from hf_algorithms.recipes.grpo import GRPO
from hf_algorithms.recipes.gspo import GSPO
from hf_algorithms.recipes.maxrl import MAXRL
from hf_algorithms.recipes.online_dpo import ONLINE_DPO
from hf_algorithms.recipes.opo import OPO
from hf_algorithms.recipes.ppo import PPO, PPOConfig
from hf_algorithms.recipes.reinforce_pp import REINFORCE_PP
from hf_algorithms.recipes.reinforce_pp_baseline import REINFORCE_PP_BASELINE
from hf_algorithms.recipes.remax import REMAX
from hf_algorithms.recipes.reward_model import REWARD_MODEL_TRAINING, RewardModelConfig
from hf_algorithms.recipes.rloo import RLOO
from hf_algorithms.recipes.safe_rlhf import SAFE_RLHF
from hf_algorithms.recipes.sapo import SAPO
from hf_algorithms.recipes.sft import SFT, SFTConfig

__all__ = [
    "ACTOR",
    "ADVANTAGE",
    "COMMAND_RECIPES",
    "COST_MODEL",
    "CRITIC",
    "POLICY_ROLES",
    "RECIPES",
    "REFERENCE",
    "REWARD",
    "REWARD_MODEL",
    "AlgorithmConfig",
    "ClipKeys",
    "CriticKeys",
    "DPOConfig",
    "GroupKeys",
    "PPOConfig",
    "PolicyConfig",
    "Recipe",
    "RewardModelConfig",
    "Role",
    "SFTConfig",
    "StdKeys",
    "StepContext",
    "StepError",
    "SupervisedConfig",
    "SupervisedDataset",
    "SupervisedRecipe",
    "WhitenKeys",
    "add_old_logprobs",
    "add_ref_logprobs",
    "build_clip",
    "find_command",
    "generate",
    "generate_scored",
    "load_recipe",
    "mini_batch_rows",
    "share_bases",
    "train_by_scores",
    "update_policy",
]

_SHIPPED = (
    PPO,
    REMAX,
    SAFE_RLHF,
    GRPO,
    DR_GRPO,
    RLOO,
    REINFORCE_PP,
    REINFORCE_PP_BASELINE,
    DAPO,
    GSPO,
    CISPO,
    SAPO,
    GMPO,
    MAXRL,
    OPO,
    DPPO_TV,
    DISTILLATION,
    ONLINE_DPO,
)
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _SHIPPED}
"""The shipped recipes by the name that `[algorithm] name` gives."""
COMMAND_RECIPES: dict[str, dict[str, Recipe]] = {
    "train": RECIPES,
    "sft": {SFT.name: SFT},
    "dpo": {DPO.name: DPO},
    "reward-model": {REWARD_MODEL_TRAINING.name: REWARD_MODEL_TRAINING},
}
"""The recipes of each command of `hybridflow`, the usual one first."""


def find_command(recipe: Recipe) -> str:
    """Returns the command that runs a recipe; one of the user's own is run by `train`."""
    return next((command for command, known in COMMAND_RECIPES.items() if recipe.name in known), "train")
