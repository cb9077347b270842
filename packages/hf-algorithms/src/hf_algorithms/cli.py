"""The `hybridflow` command."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from hf_algorithms.commands.command_line import (
    UserPath,
    describe_error,
    exit_codes,
    fail,
    print_summary,
    search_path_of,
)
from hf_algorithms.commands.data import data
from hf_algorithms.commands.models import evaluate, export, generate
from hf_algorithms.commands.replay import replay
from hf_algorithms.commands.serve import serve
from hf_algorithms.commands.training import dpo, reward_model, sft, train
from hf_algorithms.commands.watch import watch
from hf_algorithms.torch_notices import hush_torch
from hf_controller.signals import Terminated, after_imports, send_lost_signals_again
from hf_protocols import ConfigError, DataError, HybridFlowError, PlanError

__all__ = ["main"]


@click.group(
    commands=[train, sft, dpo, reward_model, data, generate, evaluate, export, replay, serve, watch],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="hf-algorithms", prog_name="hybridflow")
def cli() -> None:
    """Train language models with reinforcement learning: one program, many ranks."""


@cli.command()
@click.option("--output", type=UserPath(), default=Path("runs/quickstart"), show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--iterations", default=280, show_default=True, type=click.IntRange(min=1), help="PPO iterations.")
@click.option("--ranks", default=2, show_default=True, type=click.IntRange(min=1), help="1 runs without Ray.")
@click.option("--rollout", default="transformers", show_default=True, help="Backend that generates: rollout.backend.")
def quickstart(output: Path, seed: int, iterations: int, ranks: int, rollout: str) -> None:
    """Teach a small model addition with PPO, on this machine. Replaces an earlier quickstart in OUTPUT."""
    from hf_algorithms.commands.quickstart import check_quickstart, prepare_quickstart
    from hf_algorithms.run.loop import run_training
    from hf_algorithms.run_directory import RunDirectory

    directory = RunDirectory(output, overwrite=True)
    prepare = partial(prepare_quickstart, seed=seed, iterations=iterations, ranks=ranks, rollout=rollout)
    with exit_codes(directory):
        check_quickstart(prepare)
        settings = prepare(directory)
        summary = run_training(settings, directory)
    print_summary(summary, directory.path, settings)


@cli.command()
@click.argument("config", type=UserPath())
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a key; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON, as train --plan reads it.")
def plan(config: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show where the models of CONFIG would go, and why."""
    import tempfile

    from hf_algorithms.config import load_config
    from hf_algorithms.models.role_models import describe_generic_shapes
    from hf_algorithms.models.sampler_adapters import describe_merging
    from hf_algorithms.preflight.checks import check_run
    from hf_algorithms.preflight.placement import require_mapper
    from hf_algorithms.preflight.reward_functions import describe_logs
    from hf_algorithms.preflight.store_room import describe_store
    from hf_algorithms.recipes import SupervisedRecipe
    from hf_algorithms.run.display import build_console
    from hf_algorithms.run.supervised import check_supervised

    require_mapper()
    from hf_mapper import render_plan

    settings = load_config(config, overrides, search_path=search_path_of(config), command=None)
    with tempfile.TemporaryDirectory() as folder, exit_codes():
        if isinstance(settings.recipe, SupervisedRecipe):
            folders = search_path_of(config)
            pairs, found = check_supervised(settings, Path(folder) / "initial_model", search_path=folders)
            models, lines = pairs.models, pairs.describe_data()
            lines += pairs.describe_store(settings, found, is_here=False)
        else:
            inputs, found = check_run(settings, Path(folder) / "initial_model", search_path=search_path_of(config))
            models, lines = inputs.models, [*inputs.describe_data(), *inputs.describe_draws(settings)]
            lines += describe_logs(settings, search_path=search_path_of(config))
            lines += describe_store(settings, found, inputs, is_here=False)
        notes = [*describe_generic_shapes(models), *describe_merging(settings, models)]
    for note in notes:
        click.echo(note, err=True)
    if as_json:
        click.echo(found.to_json(), nl=False)
    else:
        for line in lines:
            click.echo(line)
        render_plan(found, build_console())


@cli.command()
@click.argument("config", type=UserPath(), required=False)
@click.option("--algorithm", metavar="NAME", help="A name that `hybridflow algorithms` lists, or file.py:RECIPE.")
@click.option("--model", metavar="DIR", help="Directory or hub name: model.path.")
@click.option("--data", metavar="FILE", help="Training rows: data.train.")
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a key; repeatable.")
def config(
    config: Path | None, algorithm: str | None, model: str | None, data: str | None, overrides: tuple[str, ...]
) -> None:
    """Print CONFIG with every key, its value and what it means; without CONFIG, a file to start from."""
    from hf_algorithms.config import format_commented, resolve_config

    path = search_path_of(config) if config else (os.getcwd(),)
    settings = resolve_config(
        config, algorithm=algorithm, model=model, data=data, overrides=overrides, search_path=path
    )
    click.echo(format_commented(settings), nl=False)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print names, summaries and roles as JSON.")
def algorithms(as_json: bool) -> None:
    """List the algorithms that `[algorithm] name` takes."""
    import json

    from hf_algorithms.recipes import RECIPES

    if as_json:
        found = [
            {"name": name, "summary": recipe.summary, "roles": [role.name for role in recipe.roles]}
            for name, recipe in RECIPES.items()
        ]
        click.echo(json.dumps(found, indent=2))
        return
    width = max(map(len, RECIPES))
    for name, recipe in RECIPES.items():
        click.echo(f"{name:{width}}  {recipe.summary}")


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print the checks, or what was measured, as JSON.")
@click.option("--calibrate", is_flag=True, help="Measure whether one rank or two train faster; future runs use it.")
def doctor(as_json: bool, calibrate: bool) -> None:
    """Show versions, devices, memory and which backends are there."""
    from hf_algorithms.commands.doctor import collect_checks, format_checks, render_checks
    from hf_algorithms.run.display import build_console

    if calibrate:
        from hf_algorithms.commands.calibrate import calibrate_host

        calibrate_host(as_json=as_json)
        return
    checks = collect_checks()
    if as_json:
        click.echo(format_checks(checks))
        sys.exit(any(check.status == "problem" for check in checks))
    sys.exit(render_checks(checks, build_console()))


@cli.command()
@click.argument("run", type=UserPath(exists=True, file_okay=False))
def report(run: Path) -> None:
    """Write RUN/report.html again from the run's files."""
    from hf_algorithms.report import write_report

    click.echo(write_report(run))


@cli.command()
@click.argument("run", type=UserPath(exists=True, file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
def trace(run: Path, as_json: bool) -> None:
    """Show where the time of RUN went: by role and method, and how idle each pool was."""
    import json
    from dataclasses import asdict

    from hf_algorithms.report import load_breakdown, render_breakdown
    from hf_algorithms.run.display import build_console

    breakdown = load_breakdown(run)
    if as_json:
        click.echo(json.dumps(asdict(breakdown), indent=2))
    else:
        render_breakdown(breakdown, build_console())


def main() -> NoReturn:
    """Runs the command line; prints one line for each error that a user can cause, and exits with a code for it.

    Exit codes: 1 a run that failed, 2 refused before anything was written, 129 SIGHUP, 130 Ctrl-C, 143 SIGTERM.
    """
    signal.signal(signal.SIGTERM, after_imports(_terminate))
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # ignored under `nohup`
        signal.signal(signal.SIGHUP, after_imports(_terminate))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # ignored in a shell's background job
        signal.signal(signal.SIGINT, after_imports(signal.default_int_handler))
    send_lost_signals_again()
    hush_torch()
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # ours shows more; workers inherit it
    try:
        sys.exit(cli.main(standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (ConfigError, DataError, PlanError) as error:
        fail(describe_error(error), 2)
    except HybridFlowError as error:
        fail(describe_error(error), 1)
    except OSError as error:
        fail(f"{error.filename or 'a file'} cannot be read or written: {error.strerror or error}", 1)
    except (KeyboardInterrupt, click.Abort):
        fail("interrupted; the files already written are complete", 130)


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM unwinds the program like Ctrl-C, so that workers are shut down on the way out."""
    raise Terminated(128 + signum)
