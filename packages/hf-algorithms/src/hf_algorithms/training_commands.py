"""`hybridflow train`, `sft`, `dpo` and `reward-model`: runs that leave a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from hf_algorithms.command_line import UserPath, exit_codes, print_summary, search_path_of
from hf_protocols.plan import load_plan

__all__ = ["dpo", "reward_model", "sft", "train"]


def _training_command(name: str) -> Callable[[Callable[[], None]], click.Command]:
    """Makes a command that trains by one of its recipes; its help is the decorated function's docstring."""

    def decorate(documented: Callable[[], None]) -> click.Command:
        @click.command(name, help=documented.__doc__)
        @click.argument("config", type=UserPath())
        @click.option(
            "--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a key; repeatable."
        )
        @click.option("--plan", "plan_file", type=UserPath(), help="Use this mapping plan.")
        @click.option("--overwrite", is_flag=True, help="Replace an earlier run in run.output_dir.")
        def command(config: Path, overrides: tuple[str, ...], plan_file: Path | None, overwrite: bool) -> None:
            _run(name, config, overrides, plan_file, overwrite=overwrite)

        return command

    return decorate


@_training_command("train")
def train() -> None:
    """Run the algorithm that CONFIG (TOML) describes on your data."""


@_training_command("sft")
def sft() -> None:
    """Fine-tune a model on the answers, chats or texts that CONFIG (TOML) names."""


@_training_command("dpo")
def dpo() -> None:
    """Train a policy on the preference pairs that CONFIG (TOML) names."""


@_training_command("reward-model")
def reward_model() -> None:
    """Train a reward model or a cost model on the preference pairs that CONFIG (TOML) names."""


def _run(command: str, config: Path, overrides: tuple[str, ...], plan_file: Path | None, *, overwrite: bool) -> None:
    from hf_algorithms.config import load_config
    from hf_algorithms.run_directory import RunDirectory
    from hf_algorithms.supervised import run_recipe

    search_path = search_path_of(config)
    settings = load_config(config, overrides, search_path=search_path, command=command)
    plan = load_plan(plan_file) if plan_file else None
    directory = RunDirectory(Path(settings.run.output_dir), overwrite=overwrite)
    with exit_codes(directory):
        summary = run_recipe(settings, directory, plan=plan, search_path=search_path)
    print_summary(summary, directory.path, settings)
