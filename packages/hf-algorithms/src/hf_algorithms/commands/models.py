"""`hybridflow generate`, `evaluate` and `export`: what a model says, how good it is, and its files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hf_algorithms.commands.data import read_values
from hf_algorithms.value_names import naming_flags

if TYPE_CHECKING:
    from hf_algorithms.evaluation.model_evaluation import EvaluationResult

__all__ = ["evaluate", "export", "generate"]

Command = TypeVar("Command", bound=Callable[..., Any])

_DRAWING = (
    click.option("--backend", metavar="NAME", help="Rollout backend: the run's, else transformers."),
    click.option(
        "--option",
        "backend_options",
        multiple=True,
        metavar="NAME=VALUE",
        help="A key of rollout.options and its value; repeatable.",
    ),
    click.option(
        "--samples", default=1, show_default=True, type=click.IntRange(min=1), help="Responses to each prompt."
    ),
    click.option(
        "--max-new-tokens",
        type=click.IntRange(min=1),
        help="Default: the run's value, else 256, or less where the context is smaller.",
    ),
    click.option(
        "--temperature", type=click.FloatRange(min=0), help="Default: 0 (greedy) for one sample, 1 for several."
    ),
    click.option(
        "--top-p",
        default=1.0,
        show_default=True,
        type=click.FloatRange(min=0, max=1, min_open=True),
        help="Draws among the likeliest tokens that together have this probability.",
    ),
    click.option(
        "--seed", default=0, show_default=True, help="Seed of sampling, together with the number of each row."
    ),
    click.option("--prompt-field", metavar="NAME", help="Field of the prompt."),
    click.option("--answer-field", metavar="NAME", help="Field of the answer."),
    click.option("--chat-template", metavar="TEXT", help="File or text, in place of the tokenizer's."),
    click.option("--system-prompt", metavar="TEXT", help="First message of chats without a system message."),
)


def _drawing(command: Command) -> Command:
    """Adds the options of reading prompts and drawing responses."""
    for option in reversed(_DRAWING):
        command = option(command)
    return command


@click.command()
@click.argument("model")
@click.option("--data", required=True, metavar="FILE", help="Prompts, in any format that training reads.")
@click.option("--output", required=True, metavar="FILE", help="JSONL; must not exist.")
@_drawing
def generate(model: str, data: str, output: str, backend_options: tuple[str, ...], **how: Any) -> None:
    """Write responses of MODEL to every row of a file.

    MODEL is a directory, a hub name or a run. Each line of the output has the row's columns, its prompt, and its
    responses with finish reason and number of tokens.
    """
    from hf_algorithms.evaluation import generation

    progress = _Progress()
    with naming_flags():
        result = generation.generate(
            model,
            data=data,
            output=output,
            backend_options=_read_options(backend_options),
            on_progress=progress.show,
            **how,
        )
    progress.clear()
    click.echo(
        f"{result.rows:,} rows, {result.responses:,} responses of {result.tokens / result.responses:.1f} tokens, "
        f"{result.truncated:,} cut by their length\n{result.output}"
    )


@click.command()
@click.argument("model", metavar="MODEL|RUN")
@click.option(
    "--data",
    multiple=True,
    metavar="[NAME=]FILE",
    help="Rows to evaluate; repeatable. Default: the test rows of the run.",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="M",
    help="A scoring function: exact_match, module:function or file.py:function; repeatable. Default: that of the run.",
)
@click.option("--rows", type=click.IntRange(min=1), help="Of each set, from the first; all by default.")
@click.option(
    "--output", "output_dir", metavar="DIR", help="For every response with its scores; must be empty or absent."
)
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
@_drawing
def evaluate(
    model: str,
    data: tuple[str, ...],
    metrics: tuple[str, ...],
    as_json: bool,
    backend_options: tuple[str, ...],
    **how: Any,
) -> None:
    """Score responses of a model to named sets of rows, with intervals; with --samples also avg@K and pass@K."""
    import json

    from hf_algorithms.evaluation import model_evaluation

    progress = _Progress()
    with naming_flags():
        result = model_evaluation.evaluate(
            model,
            data=data or None,
            metrics=metrics,
            backend_options=_read_options(backend_options),
            search_path=(os.getcwd(),),
            on_progress=lambda name, done, total: progress.show(done, total, name),
            **how,
        )
    progress.clear()
    for each in result.sets.values():
        for note in each.list_notes():
            click.echo(note, err=True)
    click.echo(json.dumps(result.summary, indent=2) if as_json else _format(result))


@click.command()
@click.argument("model", metavar="RUN|MODEL")
@click.option("--output", "output_dir", required=True, metavar="DIR", help="Must be empty or absent.")
@click.option("--iteration", type=click.IntRange(min=0), help="Of a run; the model of its last evaluation by default.")
@click.option("--merge", is_flag=True, help="Add an adapter, such as LoRA's, to the weights of its base.")
def export(model: str, output_dir: str, iteration: int | None, merge: bool) -> None:
    """Copy a model in Hugging Face format to a directory that from_pretrained loads."""
    from hf_algorithms.models import exporting

    with naming_flags():
        click.echo(exporting.export(model, output_dir=output_dir, iteration=iteration, merge=merge).model_dir)


class _Progress:
    """A line on a terminal that says how many rows are done; nothing anywhere else."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        self._is_shown = self._stream.isatty()

    def show(self, done: int, total: int, name: str = "") -> None:
        """Replaces the line by how many of `total` rows are done."""
        if self._is_shown:
            self._stream.write(f"\r{name}{' ' if name else ''}{done:,} of {total:,} rows\x1b[K")
            self._stream.flush()

    def clear(self) -> None:
        """Removes the line."""
        if self._is_shown:
            self._stream.write("\r\x1b[K")


def _format(result: EvaluationResult) -> str:
    lines = []
    for name, found in result.sets.items():
        for metric, summary in found.metrics.items():
            label = f"avg@{found.samples}" if found.samples > 1 else "mean"
            numbers = [_format_number(label, summary.mean, summary.interval)]
            numbers += [
                _format_number(f"pass@{k}", value, summary.pass_intervals[k]) for k, value in summary.pass_at.items()
            ]
            lines.append(f"{name}  {metric}  {'  '.join(numbers)}  {summary.rows:,} rows")
        lines.append(
            f"{name}  responses of {found.response_tokens:.1f} tokens, {found.truncated:.1%} cut by their length"
        )
    if result.output is not None:
        lines.append(str(result.output))
    return "\n".join(lines)


def _format_number(label: str, value: float, interval: tuple[float, float] | None) -> str:
    return f"{label} {value:.3f}" + (f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval is not None else "")


def _read_options(given: tuple[str, ...]) -> dict[str, Any]:
    return read_values(given, option="--option", example="cache_bytes=1000000000")
