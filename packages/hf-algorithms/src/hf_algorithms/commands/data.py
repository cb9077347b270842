"""`hybridflow data`: what a file holds, and the example sets."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from hf_algorithms.value_names import naming_flags
from hf_protocols.errors import ConfigError, DataError
from hf_protocols.paths import read_path
from hf_protocols.toml import parse_toml
from hf_protocols.validation import show

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from hf_algorithms.commands.data_checks import LearnedReport
    from hf_algorithms.data import DataReport, ExampleFiles

__all__ = ["data", "read_values"]

_FIELDS = ("model", "prompt_field", "answer_field")
"""Options of `check` that mean something without a model."""

_output = click.option("--output", required=True, metavar="DIR", help="Folder for the three files.")
_source = click.option("--source", metavar="DIR", help="Folder with your copy of GSM8K.")
_seed = click.option("--seed", default=0, show_default=True, help="Of the split into three files.")


@click.group()
def data() -> None:
    """Look at data before a run, or write the example sets."""


@data.command()
@click.argument("file", nargs=-1)
@click.option(
    "--config", metavar="CONFIG", help="Check the data of this TOML file as its run reads them, without FILE."
)
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a key of CONFIG.")
@click.option("--model", metavar="DIR", help="Model or tokenizer by which tokens are counted: model.path.")
@click.option("--prompt-field", metavar="NAME", help="Field of the prompt: data.prompt_field.")
@click.option("--answer-field", metavar="NAME", help="Field of the answer: data.answer_field.")
@click.option("--chat-template", metavar="TEXT", help="File or text: data.chat_template.")
@click.option(
    "--template-option", multiple=True, metavar="NAME=VALUE", help="One of data.template_options; repeatable."
)
@click.option("--system-prompt", metavar="TEXT", help="data.system_prompt.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    help="rollout.max_new_tokens: 256 by default, or what the longest prompt leaves of a smaller context.",
)
@click.option("--max-prompt-tokens", type=click.IntRange(min=1), help="data.max_prompt_tokens.")
@click.option(
    "--too-long", type=click.Choice(["error", "drop", "truncate_left"]), help="data.too_long: error by default."
)
@click.option("--block-tokens", type=click.IntRange(min=1), help="data.block_tokens, of texts to pretrain on.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON; with --config one for each key.")
def check(file: tuple[str, ...], config: str | None, overrides: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Show what FILE holds: format, columns, the first row, tokens, where turns end, and what a run leaves out.

    FILE is a path, a pattern, a directory that `datasets` saved, or a hub name. Exit code 2: a run refuses it.
    """
    if config is None:
        if not file or overrides:
            wrong = "--set is an option of --config" if overrides else "no FILE is named"
            raise ConfigError(f"hybridflow data check: {wrong}. Name a FILE, or a CONFIG with --config")
        with naming_flags():
            report, pairs = _check_files(file, options)
            content = report.to_dict() | ({} if pairs is None else {"pairs": pairs.to_dict()})
            lines = [*report.lines(), *([] if pairs is None else pairs.lines())]
            _print_report(content if as_json else lines, [report])
        return
    if (given := _list_given(options)) or file:
        raise ConfigError(
            f"hybridflow data check --config: {given[0] if given else 'FILE'} has no part in it. Set the key in "
            f"{config}, or with --set"
        )
    reports = _check_config(config, overrides)
    found: dict[str, Any] = {key: each.to_dict() for key, each in reports.items()}
    lines = [line for key, each in reports.items() for line in (f"data.{key}", *(f"  {part}" for part in each.lines()))]
    _print_report(found if as_json else lines, reports.values())


def _print_report(content: dict[str, Any] | list[str], reports: Iterable[DataReport | LearnedReport]) -> None:
    """Prints JSON or lines, then fails if a run would refuse what they report."""
    import json

    click.echo("\n".join(content) if isinstance(content, list) else json.dumps(content, indent=2))
    if refused := [each.refusal for each in reports if each.refusal]:
        raise DataError("\n".join(refused))


def _list_given(options: Mapping[str, Any]) -> list[str]:
    return [f"--{name.replace('_', '-')}" for name, value in options.items() if value not in (None, ())]


def _check_files(files: tuple[str, ...], options: dict[str, Any]) -> tuple[DataReport, LearnedReport | None]:
    from hf_algorithms.commands.data_checks import describe_pair_files
    from hf_algorithms.data import TextBlocks, TurnFormat, describe_data, open_rows, read_template

    model, template, new, block = (
        options[name] for name in ("model", "chat_template", "max_new_tokens", "block_tokens")
    )
    if model is None and (unused := _list_given({name: options[name] for name in options if name not in _FIELDS})):
        raise ConfigError(f"{unused[0]}: without a model no tokens are counted. Name one with --model")
    template_options = read_values(
        options["template_option"], option="--template-option", example="enable_thinking=false"
    )
    given = _load_model(model) if model else None
    context = None if given is None else given.context
    if context is not None and new is not None and context <= new:
        raise ConfigError(
            f"--max-new-tokens {new}: the model's context of {context} tokens has no room for a prompt and so long a "
            f"response. Set it below {context}"
        )
    if context is not None and block is not None and context < block:
        raise ConfigError(f"--block-tokens {block}: exceeds the model's context of {context} tokens. Lower it")
    turns = None
    if given is not None:
        turns = TurnFormat(
            given.tokenizer,
            template=None if template is None else read_template(template),
            options=template_options,
            system_prompt=options["system_prompt"],
            label=f"--model {model}",
        )
    rows = open_rows(
        [(read_path("FILE", each), None) for each in files],
        prompt_field=options["prompt_field"],
        answer_field=options["answer_field"],
        promptless=("texts", "preferences"),
    )
    report = describe_data(
        rows,
        turns=turns,
        model_ids=None if given is None else given.end_ids,
        num_logits=None if given is None else given.num_logits,
        context=context,
        max_new_tokens=new,
        max_prompt_tokens=options["max_prompt_tokens"],
        too_long=options["too_long"] or "error",
        block_tokens=block if context is None else block or min(context, TextBlocks.default_tokens),
    )
    return report, describe_pair_files(rows, options["prompt_field"], turns=turns, context=context)


def _check_config(config: str, overrides: tuple[str, ...]) -> dict[str, DataReport | LearnedReport]:
    from tempfile import TemporaryDirectory

    from hf_algorithms.commands.data_checks import describe_run_data
    from hf_algorithms.config import load_config

    path = Path(read_path("--config", config))
    search_path = (os.getcwd(), str(path.resolve().parent))
    settings = load_config(path, overrides, search_path=search_path, command=None)
    with TemporaryDirectory() as folder:
        return describe_run_data(settings, Path(folder) / "initial_model", search_path=search_path)


def read_values(given: Sequence[str], *, option: str, example: str) -> dict[str, Any]:
    """Returns values by name as TOML writes them; a bare word is a text.

    Args:
        given: `NAME=VALUE` each.
        option: of the command line that they belong to, for messages.
        example: of one, for messages.

    Raises:
        ConfigError: for one without a name or a value.
    """
    found: dict[str, Any] = {}
    for each in given:
        name, equals, text = each.partition("=")
        if not (name.strip() and equals):
            raise ConfigError(f"{option} {show(each)}. Write it as NAME=VALUE, such as {example}")
        try:
            found[name.strip()] = parse_toml(f"value = {text}", f"{option} {show(each)}")["value"]
        except tomllib.TOMLDecodeError:
            found[name.strip()] = text
    return found


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


@data.command("gsm8k-steps")
@_output
@_source
@_seed
def gsm8k_steps(output: str, source: str | None, seed: int) -> None:
    """Write calculator steps of GSM8K's answers, such as `16-3=`: needs --source with `train.jsonl`."""
    from hf_algorithms.data import write_gsm8k_steps

    _print(write_gsm8k_steps(read_path("--output", output), source=_read_source(source), seed=seed))


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
    """Reads the tokenizer of a directory or hub name, and the configuration of its model; of an adapter, its base's."""
    from hf_algorithms.data import load_tokenizer
    from hf_algorithms.models.initial_model import check_vocabulary
    from hf_engine import derive_shape
    from hf_engine.model_directory import (
        check_end_tokens,
        find_model,
        is_adapter,
        read_adapter,
        read_end_of_sequence_ids,
        read_model_directory,
    )

    label = f"--model {model}"
    adapter = read_adapter(model, label=label) if is_adapter(model) else None
    path = find_model(model, label=label, needs_weights=False) if adapter is None else adapter.base
    has_config = (Path(path) / "config.json").is_file()
    files = read_model_directory(path, label=label, needs_weights=False) if has_config else None
    tokenizer = load_tokenizer(model if adapter is None else str(adapter.tokenizer), label=label)
    if files is None:
        return _GivenModel(tokenizer)
    check_vocabulary(tokenizer, files, label=label)
    check_end_tokens(files)
    stated_by = "generation_config.json" if files.generation_config.get("eos_token_id") is not None else "config.json"
    end_ids = {stated_by: read_end_of_sequence_ids(files)}
    return _GivenModel(tokenizer, derive_shape(files).max_positions, end_ids, files.vocab_size)


def _print(files: ExampleFiles) -> None:
    click.echo("\n".join(map(str, (files.train, files.validation, files.test))))
