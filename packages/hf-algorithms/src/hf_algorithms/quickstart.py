"""The quickstart: PPO teaches a model of a million parameters to add two numbers, on two CPU ranks."""

from __future__ import annotations

from hf_algorithms.config import Config, parse_config
from hf_algorithms.data import write_addition_data
from hf_algorithms.run_directory import RunDirectory

__all__ = ["prepare_quickstart"]


def prepare_quickstart(
    directory: RunDirectory, *, seed: int = 0, iterations: int = 280, ranks: int = 2, rollout: str = "transformers"
) -> Config:
    """Write the addition data to ``directory/data`` and return the run's configuration.

    Args:
        directory: the run's directory.
        seed: of the data, the model and the run.
        iterations: PPO iterations of 128 completions each.
        ranks: of actor, critic and reference; with one rank the run stays in this process.
        rollout: the backend that generates.
    """
    files = write_addition_data(directory.path / "data", seed=seed)
    return parse_config(
        {
            "run": {
                "output_dir": str(directory.path),
                "seed": seed,
                "iterations": iterations,
                "executor": "ray" if ranks > 1 else "in_process",
            },
            "data": {"train": str(files.train), "validation": str(files.validation), "test": str(files.test)},
            "model": {"tokenizer": "characters", "max_positions": 16},
            "warm_start": {"max_steps": 1000, "learning_rate": 1e-3, "stop_at": 0.35, "fail_above": 0.5},
            "algorithm": {"name": "ppo", "kl_coefficient": 0.02, "gamma": 1.0, "gae_lambda": 0.95, "clip_range": 0.2},
            "optimizer": {"actor_learning_rate": 5e-5, "critic_learning_rate": 1e-3, "warmup_steps": 20},
            "rollout": {"backend": rollout, "batch_size": 128, "max_new_tokens": 5},
            "training": {"shard": "root"},
            "cluster": {"gpus_per_machine": ranks},
        }
    )
