"""Directories that appear whole or not at all, written by some ranks and waited for by all."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from hf_engine.agreement import together
from hf_protocols.errors import BackendError
from hf_protocols.validation import Checks, show

__all__ = ["agree_on_directory", "check_directory", "write_directory"]

_check = Checks(BackendError)

_WRITTEN = re.compile(
    r"config\.json|generation_config\.json|"
    r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|adapter_config\.json|adapter_model\.safetensors"
)
_OF_TOKENIZERS = {
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
}
"""Files that may stay next to a model: any other file that is not part of the model is the user's own."""
_WEIGHTS = re.compile(r".*\.safetensors")
"""Without any of them a directory holds no model."""
_UNFINISHED = re.compile(_WRITTEN.pattern + r"|part-\d+\.safetensors|\.tmp\w+")
"""Files of a model that a crash may leave, temporary files of safetensors included."""


def check_directory(directory: object) -> None:
    """Refuses what names no directory."""
    _check.kind("directory", directory, str | Path, "the path of a directory")
    if directory == "":
        raise BackendError("directory=''. Use the path of a directory")


def write_directory(directory: str | Path, write: Callable[[Path], None], group: dist.ProcessGroup) -> None:
    """Fills a directory next to `directory` and then renames it there. Collective.

    An earlier model there is replaced, a tokenizer next to it stays, and any other file is refused. A model that a
    crash left aside is put back first, so that these rules hold for it too.

    Args:
        directory: what the reader will find; its parent directories are created.
        write: called on every rank with the path to fill, which exists already.
        group: the ranks that write together; they need one file system, under the same path.

    Raises:
        BackendError: on every rank, if the operating system refused a step on any rank, if other files are there (also
            in what a crash left), or if ranks were given different directories. The earlier contents are still there
            then.
    """
    is_first = dist.get_rank(group) == 0
    with together("nothing was written", group):
        check_directory(directory)
        target = Path(directory).resolve()
        if not target.name:  # the root, which has no neighbours
            _refuse_others_files(target)
    agree_on_directory(target, group)
    filling, replaced = (target.with_name(f".{target.name}.{state}") for state in ("filling", "replaced"))
    with together("nothing was written", group):  # what is refused here stays
        if is_first:
            _refuse_others_files(filling, _UNFINISHED)
            _refuse_others_files(replaced)
            _refuse_others_files(target)
            _prepare(target, filling, replaced)
    try:
        with together("nothing was written", group):
            write(filling)
        with together("nothing was written", group):
            if is_first:
                _refuse_others_files(target)  # which may have come meanwhile
                _keep_tokenizer(target, filling)
                _replace(target, filling, replaced)
    finally:  # where all went well it has another name
        if is_first:
            shutil.rmtree(filling, ignore_errors=True)


def agree_on_directory(directory: Path, group: dist.ProcessGroup | None) -> None:
    """Refuses, on every rank, a directory that differs between ranks. Collective.

    Paths are compared, links resolved: all ranks need the same one, also where machines mount one file system.
    """
    gathered = [""] * dist.get_world_size(group)
    dist.all_gather_object(gathered, str(directory.resolve()), group=group)
    if len({*gathered}) > 1:
        given = ", ".join(f"rank {rank} {show(path)}" for rank, path in enumerate(gathered))
        raise BackendError(f"the ranks were given different directories ({given}). Give all the same one")


def _refuse_others_files(target: Path, written: re.Pattern[str] = _WRITTEN) -> None:
    """Refuses other files in a target: a working directory or a home named by mistake must not be removed."""
    if not target.exists():
        return
    if not target.is_dir() or Path.cwd().is_relative_to(target):
        what = "the working directory or above it" if target.is_dir() else "a file"
        raise BackendError(f"{target} is {what}. Use a directory of its own, which need not exist")
    foreign = [path.name for path in target.iterdir() if not _is_replaced(path, written) and not _is_kept(path)]
    if foreign:
        raise BackendError(
            f"{target} holds other files than a model's, such as {show(min(foreign))}, which would be lost. Use a "
            "directory of its own, or move them away"
        )


def _prepare(target: Path, filling: Path, replaced: Path) -> None:
    """Makes an empty directory to fill, next to the one that readers find; afterwards no model lies aside."""
    shutil.rmtree(filling, ignore_errors=True)
    if replaced.exists():
        if target.exists() and any(_is_replaced(path, _WEIGHTS) for path in target.iterdir()):
            _remove(replaced, filling)
        else:
            _put_back(target, replaced)
    filling.mkdir(parents=True)


def _put_back(target: Path, replaced: Path) -> None:
    """Puts a model back after a crash between the renames; a tokenizer that came to the target meanwhile joins it."""
    if target.exists():
        if others := [path.name for path in target.iterdir() if not _is_kept(path)]:
            raise BackendError(
                f"{target} holds {show(min(others))} and no weights, and an earlier model lies in {replaced}. "
                "Move one away"
            )
        for path in target.iterdir():
            os.replace(path, replaced / path.name)
        target.rmdir()
    os.rename(replaced, target)


def _remove(replaced: Path, filling: Path) -> None:
    """Removes it under a name that nobody reads: a crash must not leave half a model that would be put back."""
    os.rename(replaced, filling)
    shutil.rmtree(filling, ignore_errors=True)


def _is_replaced(path: Path, written: re.Pattern[str]) -> bool:
    return path.is_file() and written.fullmatch(path.name) is not None


def _is_kept(path: Path) -> bool:
    return path.is_file() and path.name in _OF_TOKENIZERS


def _keep_tokenizer(target: Path, filling: Path) -> None:
    for path in target.iterdir() if target.exists() else ():
        if _is_kept(path) and not (filling / path.name).exists():
            shutil.copy2(path, filling / path.name)


def _replace(target: Path, filling: Path, replaced: Path) -> None:
    """Makes two renames: a reader between them finds nothing, never half; a crash there leaves the old one aside."""
    if target.exists():
        os.rename(target, replaced)
    try:
        os.rename(filling, target)
    except OSError:
        if replaced.exists():
            os.rename(replaced, target)
        raise
    if replaced.exists():
        _remove(replaced, filling)
