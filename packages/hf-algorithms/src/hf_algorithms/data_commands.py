"""`hybridflow data`: what a file holds, and the example sets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import click

from hf_protocols.errors import ConfigError
from hf_protocols.paths import read_path

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

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
@click.option("--chat-template", metavar="TEXT", help="File or text: data.chat_template.")
@click.option("--system-prompt", metavar="TEXT", help="data.system_prompt.")
@click.option("--max-new-tokens", default=_NEW_TOKENS, show_default=True, type=click.IntRange(min=1))
@click.option("--max-prompt-tokens", type=click.IntRange(min=1), help="data.max_prompt_tokens.")
@click.option("--too-long", type=click.Choice(["error", "drop", "truncate_left"]), default="error", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def check(
    file: tuple[str, ...],
    model: str | None,
    prompt_field: str | None,
    answer_field: str | None,
    chat_template: str | None,
    system_prompt: str | None,
    max_new_tokens: int,
    max_prompt_tokens: int | None,
    too_long: str,
    as_json: bool,
) -> None:
    """Show what FILE holds: format, columns, the first row, tokens, where turns end, and what a run leaves out.

    FILE is a path, a pattern, a directory that `datasets` saved, or a hub name. Exit code 2: a run refuses it.
    """
    import json

    from hf_algorithms.data import TurnFormat, describe_data, read_template

    given = _load_model(model) if model else None
    context = None if given is None else given.context
    if context is not None and context <= max_new_tokens:
        raise ConfigError(
            f"--max-new-tokens {max_new_tokens}: the model's context of {context} tokens has no room for a prompt and "
            f"so long a response. Set it below {context}"
        )
    room = None if context is None else context - max_new_tokens
    bounds = [each for each in (room, max_prompt_tokens) if each is not None and given is not None]
    template = None if chat_template is None else read_template(chat_template)
    turns = None
    if given is not None:
        turns = TurnFormat(given.tokenizer, template=template, system_prompt=system_prompt, label=f"--model {model}")
    report = describe_data(
        [(read_path("FILE", each), None) for each in file],
        turns=turns,
        model_ids=None if given is None else given.end_ids,
        num_logits=None if given is None else given.num_logits,
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


class _GivenModel(NamedTuple):
    """A tokenizer, and of the model next to it, if there is one, its context, ends and logits."""

    tokenizer: PreTrainedTokenizerBase
    context: int | None = None
    end_ids: Mapping[str, Collection[int]] | None = None
    num_logits: int | None = None


def _load_model(model: str) -> _GivenModel:
    """Reads the tokenizer of a directory or hub name, and the configuration of its model."""
    from hf_algorithms.data import load_tokenizer
    from hf_engine import derive_shape
    from hf_engine.model_directory import find_model, read_end_of_sequence_ids, read_model_directory

    label = f"--model {model}"
    tokenizer = load_tokenizer(model, label=label)
    path = find_model(model, label=label, needs_weights=False)
    if not (Path(path) / "config.json").is_file():
        return _GivenModel(tokenizer)
    files = read_model_directory(path, label=label, needs_weights=False)
    stated_by = "generation_config.json" if files.generation_config.get("eos_token_id") is not None else "config.json"
    end_ids = {stated_by: read_end_of_sequence_ids(files)}
    return _GivenModel(tokenizer, derive_shape(files).max_positions, end_ids, files.vocab_size)


def _print(files: ExampleFiles) -> None:
    click.echo("\n".join(map(str, (files.train, files.validation, files.test))))
