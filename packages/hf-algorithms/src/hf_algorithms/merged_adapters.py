"""Directories that hold an adapter of peft, such as LoRA's, and the whole model that it makes of its base."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

from hf_algorithms.initial_model import without_progress
from hf_protocols import ConfigError
from hf_protocols.arguments import show
from hf_protocols.outer_files import read_json_object

__all__ = ["is_adapter", "merge_adapter"]

_CONFIG = "adapter_config.json"
_WEIGHTS = frozenset({"adapter_model.safetensors", "adapter_model.bin", _CONFIG})


def is_adapter(path: str | Path) -> bool:
    """True for a directory with an adapter and without a whole model."""
    return (Path(path) / _CONFIG).is_file() and not (Path(path) / "config.json").is_file()


def merge_adapter(path: str | Path, output: Path, *, label: str) -> None:
    """Writes the base model with the adapter added to its weights, and the tokenizer's files.

    Args:
        path: directory of the adapter; its configuration names the base.
        output: a directory that does not exist.
        label: beginning of messages.

    Raises:
        ConfigError: without peft, and for an adapter whose base is not named or absent.
    """
    try:
        peft: Any = import_module("peft")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{label}: holds an adapter, which peft merges into its base, and {error.name} is not installed: "
            'pip install "hf-algorithms[lora]"'
        ) from error
    from transformers import AutoModelForCausalLM

    from hf_engine.model_directory import errors_of, find_model

    folder = Path(path)
    base = read_json_object(ConfigError, folder / _CONFIG, name=f"{label}: {_CONFIG}").get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{label}: its {_CONFIG} names no base_model_name_or_path. Add the base model's directory")
    found = find_model(base, label=f"{label}: its base model {show(base)}")
    with without_progress(), errors_of("peft", f"{label}: cannot be merged into {show(base)}"):
        model = AutoModelForCausalLM.from_pretrained(str(found), dtype="auto")
        merged = peft.PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
        merged.save_pretrained(output)
    # The adapter's own files win: it may have been trained with another chat template.
    for source in (found, folder):
        for file in sorted(source.iterdir()):
            if file.is_file() and _belongs_to_tokenizer(file, output):
                shutil.copyfile(file, output / file.name)


def _belongs_to_tokenizer(file: Path, output: Path) -> bool:
    """True for what `save_pretrained` of a model does not write."""
    if file.name in _WEIGHTS or file.name.startswith("."):
        return False
    is_weights = file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") or file.name.endswith(".index.json")
    is_models = file.name in ("config.json", "generation_config.json") and (output / file.name).exists()
    return not (is_weights or is_models)
