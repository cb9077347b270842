"""The configuration of a run: one TOML file, whose every key is checked when it is read.

What lives here: the sections and their keys, how a file, `--set` and Python become one, and messages about keys.
What must not: looking at data, models or the machine. `preflight` does that.
"""

from __future__ import annotations

from hf_algorithms.config._comments import build_new, describe_keys, format_commented, resolve_config
from hf_algorithms.config._deadlines import DeadlinesConfig
from hf_algorithms.config._evaluation import EvaluationConfig
from hf_algorithms.config._keys import config_keys
from hf_algorithms.config._lora import ModelLoraConfig
from hf_algorithms.config._other_projects import FOREIGN_KEYS
from hf_algorithms.config._reading import load_config, parse_config, read_overrides, read_sections, set_key
from hf_algorithms.config._run import RunConfig
from hf_algorithms.config._scoring import CostConfig, FunctionConfig, RewardConfig, ScorerConfig
from hf_algorithms.config._sections import (
    ClusterConfig,
    Config,
    DataConfig,
    DataSource,
    ModelConfig,
    OptimizerConfig,
    RoleConfig,
    RolloutConfig,
    TrainingConfig,
    WarmStartConfig,
)
from hf_algorithms.config._writing import build_sections, format_toml, with_plain_scalars

__all__ = [
    "FOREIGN_KEYS",
    "ClusterConfig",
    "Config",
    "CostConfig",
    "DataConfig",
    "DataSource",
    "DeadlinesConfig",
    "EvaluationConfig",
    "FunctionConfig",
    "ModelConfig",
    "ModelLoraConfig",
    "OptimizerConfig",
    "RewardConfig",
    "RoleConfig",
    "RolloutConfig",
    "RunConfig",
    "ScorerConfig",
    "TrainingConfig",
    "WarmStartConfig",
    "build_new",
    "build_sections",
    "config_keys",
    "describe_keys",
    "format_commented",
    "format_toml",
    "load_config",
    "parse_config",
    "read_overrides",
    "read_sections",
    "resolve_config",
    "set_key",
    "with_plain_scalars",
]
