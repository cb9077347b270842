"""Whole models made from an adapter and its base."""

from __future__ import annotations

import shutil
from pathlib import Path

from hf_engine.model_directory import is_adapter, read_adapter
from hf_protocols.errors import ModelError

__all__ = ["merge_adapter"]


def merge_adapter(model: str | Path, directory: str | Path, *, label: str | None = None) -> None:
    """Writes the whole model that a LoRA adapter in peft's format makes of its base, each tensor in the base's dtype.

    The sum is made in float32, in this process, on the CPU. The adapter's tokenizer goes with it, or else the base's.

    Args:
        model: directory of the adapter.
        directory: where to write; created.
        label: what messages begin with; the value of `model` by default.

    Raises:
        ModelError: for a directory without an adapter, or an adapter without its base.
        BackendError: for an adapter that does not fit its base, or without peft.
    """
    if not is_adapter(model):
        raise ModelError(f"{label or model}: holds no adapter_config.json. Give the directory of an adapter")
    adapter = read_adapter(model, label=label)
    from hf_engine.models.lora import write_merged

    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    write_merged(adapter, target)
    for path in adapter.tokenizer_files:
        shutil.copy2(path, target / path.name)
