"""Finds a model: a directory as the user wrote it, or a name on the hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hf_engine.model_directory._borders import one_line
from hf_protocols.errors import ModelError
from hf_protocols.foreign_code import raised_as
from hf_protocols.paths import explain_variables
from hf_protocols.validation import Checks, show

__all__ = ["find_file", "find_model", "is_hub_name", "label_of"]

_check = Checks(ModelError)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_CONFIGURATION = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
_WEIGHTS = ["*.safetensors"]
_UNREACHABLE = ("LocalEntryNotFoundError", "OfflineModeIsEnabled")


def label_of(model: object) -> str:
    """Beginning of a message about a model, if the caller has no key for it."""
    return show(str(model)) if isinstance(model, str | Path) else show(model)


def is_hub_name(model: str | Path) -> bool:
    """True if this can only be a name on the hub: not a path, and nothing lies there."""
    text = str(model)
    if isinstance(model, Path) or not _HUB_NAME.fullmatch(text) or ".." in text or "--" in text:
        return False
    return not os.path.exists(text)


def find_model(model: str | Path, *, label: str | None = None, needs_weights: bool = True) -> Path:
    """The directory itself, or the one into which the hub's client puts a model of that name.

    Args:
        model: a directory, `~` allowed, or a name on the hub.
        label: what messages begin with; the value given by default.
        needs_weights: False fetches configuration and tokenizer only, unless the hub's client has more already.

    Raises:
        ModelError: if there is none.
    """
    _check.kind("model", model, str | Path, "a directory in Hugging Face format, or a name on the hub")
    name = label or label_of(model)
    if not str(model).strip():
        raise ModelError(f"{name}: is empty. Name a directory, or a name on the hub")
    directory = _expand(model, name)
    if os.path.isdir(directory):
        return directory
    _refuse_file(directory, name)
    if not is_hub_name(model):
        raise ModelError(f"{name}: {_why_absent(str(model))}")
    return _fetch(str(model), name, _CONFIGURATION + (_WEIGHTS if needs_weights else []))


def find_file(model: str | Path, name: str) -> Path:
    """One file of a model: in its directory, or where the hub's client keeps it, which fetches it if it must.

    Raises:
        ModelError: if there is none.
    """
    path = find_model(model, needs_weights=False) / name
    if not path.is_file():
        raise ModelError(f"{label_of(model)}: has no {name}")
    return path


def _expand(model: str | Path, name: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError:
        raise ModelError(f"{name}: no such directory, there is no user of that name") from None


def _refuse_file(path: Path, name: str) -> None:
    try:
        is_there = path.exists()
    except (OSError, ValueError) as error:  # of a path that is too long, or holds a NUL
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"{name}: no such directory: {reason}") from None
    if is_there:
        kind = " in the format of llama.cpp" if path.suffix == ".gguf" else ""
        raise ModelError(f"{name}: is a file{kind}, not a directory. Name a directory")
    if path.is_symlink():
        raise ModelError(f"{name}: is a link to {show(os.readlink(path))}, which leads to nothing. Name a directory")


def _why_absent(text: str) -> str:
    if text != text.strip():
        return f"no such directory; the value begins or ends with a blank. Did you mean {show(text.strip())}?"
    return f"no such directory{explain_variables(text)}"


def _fetch(model: str, name: str, patterns: list[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        raise ModelError(
            f"{name}: no such directory, and a name on the hub needs huggingface-hub: pip install huggingface-hub"
        ) from None
    with raised_as(lambda error: ModelError(f"{name}: no such directory, and {_why_not_fetched(error)}")):
        return Path(snapshot_download(model, allow_patterns=patterns))


def _why_not_fetched(error: BaseException) -> str:
    kinds = {each.__name__ for each in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return "the hub lets nobody fetch it who has not accepted its terms. Accept them and run `hf auth login`"
    if "RepositoryNotFoundError" in kinds:
        return "the hub has no model of that name that you may read. Check the name, or run `hf auth login`"
    if kinds & {*_UNREACHABLE} or isinstance(error, ConnectionError) or type(error).__module__.startswith("httpx"):
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0").upper() in _SET else ""
        return f"the hub is not reachable{offline}. Name a directory"
    return f"the hub's client says {one_line(error)}"


_SET = ("1", "ON", "YES", "TRUE")
