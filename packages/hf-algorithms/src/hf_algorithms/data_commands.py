"""`hybridflow data`: what a file holds, and the example sets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from hf_protocols.errors import ConfigError
from hf_protocols.paths import read_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_algorithms.data import ExampleFiles, TooLong

__all__ = ["data"]

_NEW_TOKENS = 256
"""The default of `rollout.max_new_tokens`."""

_output = click.option("--output", required=True, metavar="DIR", help="Folder for the three files.")
_source = click.option("--source", metavar="DIR", help="Folder with your copy of GSM8K.")
_seed = click.option("--seed", default=0, show_default=True, help="Of the split into three files.")


@click.group()
def data() -> None:
    """Look at data before a run, or write the example sets."""


@data.command()
@click.argument("file", nargs=-1, required=True)
@click.option("--model", metavar="DIR", help="Model or tokenizer by which tokens are counted: model.path.")
@click.option("--prompt-field", metavar="NAME", help="Field of the prompt: data.prompt_field.")
@click.option("--answer-field", metavar="NAME", help="Field of the answer: data.answer_field.")
@click.option("--max-new-tokens", default=_NEW_TOKENS, show_default=True, type=click.IntRange(min=1))
@click.option("--max-prompt-tokens", type=click.IntRange(min=1), help="data.max_prompt_tokens.")
@click.option("--too-long", type=click.Choice(["error", "drop", "truncate_left"]), default="error", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def check(
    file: tuple[str, ...],
    model: str | None,
    prompt_field: str | None,
    answer_field: str | None,
    max_new_tokens: int,
    max_prompt_tokens: int | None,
    too_long: str,
    as_json: bool,
) -> None:
    """Show what FILE holds: format, columns, the first row, tokens, and what a run leaves out.

    FILE is a path, a pattern, a directory that `datasets` saved, or a hub name. Exit code 2: a run refuses it.
    """
    import json

    from hf_algorithms.data import describe_data

    tokenizer, context = _load_model(model) if model else (None, None)
    if context is not None and context <= max_new_tokens:
        raise ConfigError(
            f"--max-new-tokens {max_new_tokens}: the model's context of {context} tokens has no room for a prompt and "
            f"so long a response. Set it below {context}"
        )
    room = None if context is None else context - max_new_tokens
    bounds = [each for each in (room, max_prompt_tokens) if each is not None and tokenizer is not None]
    report = describe_data(
        [(read_path("FILE", each), None) for each in file],
        tokenizer=tokenizer,
        prompt_field=prompt_field,
        answer_field=answer_field,
        max_prompt_tokens=min(bounds, default=None),
        too_long=cast("TooLong", too_long),
    )
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        click.echo("\n".join(report.lines()))


@data.command()
@_output
@_seed
def addition(output: str, seed: int) -> None:
    """Write problems such as `37+85=`, on which the quickstart trains."""
    from hf_algorithms.data import write_addition_data

    _print(write_addition_data(read_path("--output", output), seed=seed))


@data.command()
@_output
@_source
@_seed
def gsm8k(output: str, source: str | None, seed: int) -> None:
    """Write questions and worked answers of GSM8K: needs --source with `train.jsonl`."""
    from hf_algorithms.data import write_gsm8k_data

    _print(write_gsm8k_data(read_path("--output", output), source=_read_source(source), seed=seed))


@data.command("gsm8k-preferences")
@_output
@_source
@_seed
def gsm8k_preferences(output: str, source: str | None, seed: int) -> None:
    """Write pairs of a right and a wrong solution: needs --source with `solutions.jsonl`."""
    from hf_algorithms.data import write_gsm8k_preferences

    _print(write_gsm8k_preferences(read_path("--output", output), source=_read_source(source), seed=seed))


def _read_source(source: str | None) -> str | None:
    return None if source is None else read_path("--source", source)


def _load_model(model: str) -> tuple[PreTrainedTokenizerBase, int | None]:
    """The tokenizer of a directory or hub name, and the context of its model if there is a model."""
    from hf_algorithms.data import load_tokenizer
    from hf_engine.model_directory import find_model, read_model_directory

    label = f"--model {model}"
    tokenizer = load_tokenizer(model, label=label)
    path = find_model(model, label=label, needs_weights=False)
    if not (Path(path) / "config.json").is_file():
        return tokenizer, None
    files = read_model_directory(path, label=label, needs_weights=False)
    return tokenizer, files.require_shape().max_positions


def _print(files: ExampleFiles) -> None:
    click.echo("\n".join(map(str, (files.train, files.validation, files.test))))
