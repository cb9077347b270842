"""Errors of commands with flags name the flags, errors of functions their arguments."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from hf_algorithms.value_names import naming_arguments, naming_flags, naming_parameters
from hf_protocols import ConfigError, DataError, HybridFlowError


@click.command()
@click.option("--prompt-field")
@click.option("--max-new-tokens")
@click.option("--metric", "metrics", multiple=True)
@click.option("--option", "backend_options", multiple=True)
@click.option("--data")
@click.argument("message")
def command(message: str, **options: object) -> None:
    with naming_flags():
        raise DataError(message)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("a.jsonl has no prompt. Set data.prompt_field", "a.jsonl has no prompt. Set --prompt-field"),
        ("9 (max_new_tokens). Lower rollout.max_new_tokens", "9 (--max-new-tokens). Lower --max-new-tokens"),
        ("metrics is missing. Name a function", "--metric is missing. Name a function"),
        ("metrics = 'f': does not exist", "--metric 'f': does not exist"),
        ("backend_options.dtype: no such option", "--option dtype: no such option"),
        ("backend_options.cache_bytes = 9: too few", "--option cache_bytes=9: too few"),
        ("data = 'data.jsonl', line 1: data of no use", "--data 'data.jsonl', line 1: data of no use"),
        ("its fields are 'prompt_field', 'data.prompt_field'", "its fields are 'prompt_field', 'data.prompt_field'"),
        ("/a/max_new_tokens/b: the data.prompt_fields", "/a/max_new_tokens/b: the data.prompt_fields"),
        ("model = 'm': data.too_long has no flag here", "model = 'm': data.too_long has no flag here"),
    ],
)  # fmt: skip
def test_flags_stand_for_keys_and_arguments(message: str, says: str) -> None:
    outcome = CliRunner().invoke(command, [message])
    assert (type(outcome.exception), str(outcome.exception)) == (DataError, says)


def test_arguments_stand_for_keys_and_flags() -> None:
    error = ConfigError("data.chat_template = 'x': cannot be read. Set data.too_long")
    error.add_note("kept")
    with pytest.raises(ConfigError) as raised, naming_arguments():
        raise error
    assert raised.value is error and error.__notes__ == ["kept"]
    assert str(error) == "chat_template = 'x': cannot be read. Set data.too_long"
    says = r"^output_dir='/x' is not empty. Choose another, or overwrite=True to replace it$"
    with pytest.raises(HybridFlowError, match=says), naming_parameters():
        raise ConfigError("run.output_dir='/x' is not empty. Choose another, or --overwrite to replace it")
