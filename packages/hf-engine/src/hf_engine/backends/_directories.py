"""Directories that appear whole or not at all, written by some ranks and waited for by all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from hf_engine.backends._agreement import together
from hf_protocols.arguments import check_kind
from hf_protocols.errors import BackendError

__all__ = ["check_directory", "write_directory"]

_SUFFIXES = {".safetensors", ".distcp"}
_NAMES = {
    ".metadata",
    "added_tokens.json",
    "chat_template.jinja",
    "checkpoint.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "model.safetensors.index.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
}
"""What a model or a checkpoint consists of: a directory with anything else is somebody's own."""


def check_directory(directory: object) -> None:
    """Refuses what names no directory."""
    check_kind(BackendError, "directory", directory, str | Path, "the path of a directory")
    if directory == "":
        raise BackendError("directory='': give the path of a directory")


def write_directory(directory: str | Path, write: Callable[[Path], None], group: dist.ProcessGroup) -> None:
    """Fills a directory beside `directory` and then renames it there. Collective.

    An earlier model or checkpoint there is replaced, and nothing else.

    Args:
        directory: what the reader will find; its parent directories are created.
        write: called on every rank with the path to fill, which exists already.
        group: the ranks that write together; they need one file system.

    Raises:
        BackendError: on every rank, if the operating system refused a step on any, or where other files are: what was
            there is still there.
    """
    is_first = dist.get_rank(group) == 0
    with together("write", group):
        check_directory(directory)
        target = Path(directory).resolve()
        filling = target.with_name(f".{target.name}.filling")
        if is_first:
            _refuse_others_files(target)
            _prepare(filling)
    with together("write", group):
        write(filling)
    with together("write", group):
        if is_first:
            _replace(target, filling)


def _refuse_others_files(target: Path) -> None:
    """A working directory or a home that was named by mistake must not go."""
    if not target.exists():
        return
    if not target.is_dir() or Path.cwd().is_relative_to(target):
        what = "the working directory or above it" if target.is_dir() else "a file"
        raise BackendError(f"{target} is {what}: give a directory of its own, which need not exist")
    foreign = [path.name for path in target.iterdir() if path.name not in _NAMES and path.suffix not in _SUFFIXES]
    if foreign:
        raise BackendError(
            f"{target} holds other files than a model's or a checkpoint's, such as {min(foreign)!r}, which would be "
            "lost: give a directory of its own, or empty it first"
        )


def _prepare(filling: Path) -> None:
    shutil.rmtree(filling, ignore_errors=True)
    filling.mkdir(parents=True)


def _replace(target: Path, filling: Path) -> None:
    """Two renames: a reader between them finds nothing, never a half; a crash there leaves the old one aside."""
    replaced = target.with_name(f".{target.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        os.rename(target, replaced)
    os.rename(filling, target)
    shutil.rmtree(replaced, ignore_errors=True)
