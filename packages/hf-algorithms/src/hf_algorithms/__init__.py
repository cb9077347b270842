"""PPO and its relatives as short programs over roles, and the `hybridflow` command.

What must not live here: how rows or weights move (hf-controller, hf-engine), and how GPUs are chosen (hf-mapper).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_algorithms.advantages import GAE, GroupAdvantage, LagrangianAdvantage, Multiplier, ReinforceAdvantage
    from hf_algorithms.api.training import TrainingResult, dpo, reward_model, sft, train
    from hf_algorithms.config import Config, load_config, parse_config
    from hf_algorithms.dataflow import derive_dataflow
    from hf_algorithms.evaluation.generation import generate
    from hf_algorithms.evaluation.model_evaluation import evaluate
    from hf_algorithms.losses import PolicyLoss, SupervisedLoss, ValueLoss
    from hf_algorithms.models.exporting import export
    from hf_algorithms.recipes import RECIPES, AlgorithmConfig, PPOConfig, Recipe, Role, StepContext
    from hf_algorithms.roles import Roles
    from hf_algorithms.run.loop import run_training
    from hf_algorithms.run.supervised import run_supervised
    from hf_algorithms.run_directory import RunDirectory

__all__ = [
    "GAE",
    "RECIPES",
    "AlgorithmConfig",
    "Config",
    "GroupAdvantage",
    "LagrangianAdvantage",
    "Multiplier",
    "PPOConfig",
    "PolicyLoss",
    "Recipe",
    "ReinforceAdvantage",
    "Role",
    "Roles",
    "RunDirectory",
    "StepContext",
    "SupervisedLoss",
    "TrainingResult",
    "ValueLoss",
    "derive_dataflow",
    "dpo",
    "evaluate",
    "export",
    "generate",
    "load_config",
    "parse_config",
    "reward_model",
    "run_supervised",
    "run_training",
    "sft",
    "train",
]

_HOMES = {
    "advantages": ("GAE", "GroupAdvantage", "LagrangianAdvantage", "Multiplier", "ReinforceAdvantage"),
    "config": ("Config", "load_config", "parse_config"),
    "dataflow": ("derive_dataflow",),
    "models.exporting": ("export",),
    "evaluation.generation": ("generate",),
    "losses": ("PolicyLoss", "SupervisedLoss", "ValueLoss"),
    "evaluation.model_evaluation": ("evaluate",),
    "api.training": ("TrainingResult", "dpo", "reward_model", "sft", "train"),
    "recipes": ("RECIPES", "AlgorithmConfig", "PPOConfig", "Recipe", "Role", "StepContext"),
    "roles": ("Roles",),
    "run.loop": ("run_training",),
    "run_directory": ("RunDirectory",),
    "run.supervised": ("run_supervised",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import: only what is asked for is loaded
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_algorithms.api.notebook import hide_widget_hints

    hide_widget_hints()  # before the import that would show them
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
