"""The quickstart: PPO teaches a model of a million parameters to add two numbers, on two CPU ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from hf_algorithms.config import Config, parse_config
from hf_algorithms.data import write_addition_data
from hf_algorithms.run_directory import RunDirectory

__all__ = ["check_quickstart", "prepare_quickstart"]


def check_quickstart(prepare: Callable[[RunDirectory], Config]) -> None:
    """Refuse a quickstart that cannot run, in a folder of its own: its data replaces an earlier quickstart's.

    Args:
        prepare: `prepare_quickstart` with all its arguments except the directory.

    Raises:
        HybridFlowError: as the run itself would before anything starts.
    """
    from hf_algorithms.preflight.checks import check_run
    from hf_algorithms.preflight.machine import check_machine

    with TemporaryDirectory() as folder:
        config = prepare(RunDirectory(Path(folder) / "run"))
        _, plan = check_run(config, Path(folder) / "initial_model")
    check_machine(config, plan)


def prepare_quickstart(
    directory: RunDirectory, *, seed: int = 0, iterations: int = 280, ranks: int = 2, rollout: str = "transformers"
) -> Config:
    """Begin the run's directory, write the addition data to its `data` and return the run's configuration.

    Args:
        directory: the run's directory.
        seed: of the data, the model and the run.
        iterations: PPO iterations of 128 completions each.
        ranks: of actor, critic and reference; with one rank the run stays in this process.
        rollout: the backend that generates.
    """
    directory.begin()
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
            "algorithm": {"name": "ppo", "kl_coefficient": 0.02, "gamma": 1.0, "gae_lambda": 0.95, "clip_low": 0.2},
            "optimizer": {"actor_learning_rate": 5e-5, "critic_learning_rate": 1e-3, "warmup_steps": 20},
            "rollout": {"backend": rollout, "batch_size": 128, "max_new_tokens": 5},
            "training": {"shard": "root"},
            "cluster": {"gpus_per_machine": ranks},
        }
    )
