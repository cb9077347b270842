"""`hybridflow train`, `sft`, `dpo` and `reward-model`: runs that leave a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from hf_algorithms.commands.command_line import UserPath, exit_codes, print_summary, search_path_of
from hf_protocols.plan import load_plan

__all__ = ["dpo", "reward_model", "sft", "train"]


def _training_command(name: str) -> Callable[[Callable[[], None]], click.Command]:
    """Makes a command that trains by one of its recipes; its help is the decorated function's docstring."""

    def decorate(documented: Callable[[], None]) -> click.Command:
        @click.command(name, help=documented.__doc__)
        @click.argument("config", type=UserPath(), required=False)
        @click.option(
            "--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a key; repeatable."
        )
        @click.option("--plan", "plan_file", type=UserPath(), help="Use this mapping plan.")
        @click.option("--overwrite", is_flag=True, help="Replace an earlier run in run.output_dir.")
        @click.option("--resume", type=UserPath(), metavar="RUN", help="Go on with the run in this directory.")
        @click.option(
            "--allow-changed",
            "allowed",
            multiple=True,
            metavar="KEY",
            help="With --resume: a key that --set may change.",
        )
        def command(
            config: Path | None,
            overrides: tuple[str, ...],
            plan_file: Path | None,
            overwrite: bool,
            resume: Path | None,
            allowed: tuple[str, ...],
        ) -> None:
            if resume is not None:
                _refuse_with_resume(config, plan_file, overwrite=overwrite)
                _resume(name, resume, overrides, allowed)
            elif config is None or allowed:
                raise click.UsageError(
                    "--allow-changed goes with --resume." if allowed else "Missing argument 'CONFIG'."
                )
            else:
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
    from hf_algorithms.run.any_run import run_recipe
    from hf_algorithms.run_directory import RunDirectory

    search_path = search_path_of(config)
    settings = load_config(config, overrides, search_path=search_path, command=command)
    plan = load_plan(plan_file) if plan_file else None
    directory = RunDirectory(Path(settings.run.output_dir), overwrite=overwrite)
    with exit_codes(directory):
        summary = run_recipe(settings, directory, plan=plan, search_path=search_path)
    print_summary(summary, directory.path, settings)


def _refuse_with_resume(config: Path | None, plan_file: Path | None, *, overwrite: bool) -> None:
    given = {"CONFIG": config is not None, "--plan": plan_file is not None, "--overwrite": overwrite}
    if named := [name for name, is_given in given.items() if is_given]:
        raise click.UsageError(f"--resume takes what RUN was started with. Leave out {', '.join(named)}.")


def _resume(command: str, run: Path, overrides: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    from hf_algorithms.checkpoints import open_resumption
    from hf_algorithms.config import read_overrides
    from hf_algorithms.run.any_run import run_recipe

    with exit_codes():
        found = open_resumption(run, read_overrides(overrides), allowed, command=command)
    if found.is_finished:
        done = f"{found.iteration} iterations"
        click.echo(f"{found.directory.path}: the run has finished its {done}. For more use --set run.iterations=N")
        return
    with exit_codes(found.directory):
        summary = run_recipe(
            found.config, found.directory, plan=found.plan, search_path=found.search_path, resume=found
        )
    print_summary(summary, found.directory.path, found.config)
