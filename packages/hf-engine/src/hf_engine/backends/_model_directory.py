"""Where a model lies, and what its files say to an engine that another process runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hf_engine.resharding.checking import read_shapes
from hf_protocols.arguments import are_whole, check_kind
from hf_protocols.errors import BackendError, ReshardError

__all__ = [
    "check_end_of_sequence_ids",
    "check_model",
    "find_file",
    "find_model",
    "read_end_of_sequence_ids",
    "refuse_incomplete",
]


def check_model(model: object) -> None:
    """Refuses what names no model: neither text nor a path, or a path that no name on the hub looks like.

    Raises:
        BackendError: for another kind.
        FileNotFoundError: if there is no such directory.
    """
    check_kind(BackendError, "model", model, str | Path, "a directory in Hugging Face format, or a name on the hub")
    is_path = isinstance(model, Path) or str(model).startswith(("/", ".", "~")) or str(model).count("/") > 1
    if is_path and not Path(str(model)).is_dir():
        raise FileNotFoundError("the directory does not exist; give one in Hugging Face format")


def find_model(model: str | Path) -> Path:
    """The directory itself, or the one into which the hub's client puts a model of that name.

    Raises:
        BackendError: if there is none.
    """
    directory = Path(model)
    if directory.is_dir():
        return directory
    try:
        check_model(model)
    except FileNotFoundError as error:
        raise BackendError(f"there is no model in {str(model)!r}: {error}") from error
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError
    except ModuleNotFoundError as error:
        raise BackendError(
            f"there is no directory {str(model)!r}, and a name on the hub needs huggingface-hub: pip install "
            "huggingface-hub, or give a directory"
        ) from error
    try:
        return Path(snapshot_download(str(model), allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, HFValidationError) as error:
        raise BackendError(f"there is no model in {str(model)!r}: {error}") from error


def find_file(model: str | Path, name: str) -> Path:
    """One file of a model: in its directory, or where the hub's client keeps it, which fetches it if it must.

    Raises:
        OSError: if there is none.
        ValueError: for a name that is none on the hub.
    """
    directory = Path(model)
    if not directory.is_dir():
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(str(model), name))
    path = directory / name
    if not path.is_file():
        raise FileNotFoundError(f"{str(directory)!r} has no {name}")
    return path


def read_end_of_sequence_ids(directory: Path, vocab_size: int) -> frozenset[int]:
    """The tokens that end a response of a model by themselves: its generation config's, else its config's; without
    those that its vocabulary lacks, which are never drawn.

    Raises:
        BackendError: for a file that cannot be read, or ends that are no token ids.
    """
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        try:
            config: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
            ids = config.get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise BackendError(
                f"{str(path)!r} cannot be read ({error}): give a whole directory of one model"
            ) from error
        if ids is not None:
            return check_end_of_sequence_ids(ids, vocab_size)
    return frozenset()


def check_end_of_sequence_ids(ids: object, vocab_size: int) -> frozenset[int]:
    """Those of the vocabulary, of one id or a list of them."""
    tokens = [ids] if isinstance(ids, int) else ids
    if not are_whole(tokens):
        raise BackendError(f"the model's eos_token_id={ids!r}: give a token id or a list of them in its configuration")
    return frozenset(token for token in cast("Sequence[int]", tokens) if 0 <= token < vocab_size)


def refuse_incomplete(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses weights that an engine would start without, with what its memory happens to hold in their place.

    Args:
        directory: `config.json` and safetensors files, of which only the headers are read.
        shapes: of every parameter that the model needs.

    Raises:
        BackendError: if the files cannot be read, or lack a parameter, or hold one of another shape.
    """
    try:
        found = read_shapes(directory)
    except ReshardError as error:
        raise BackendError(f"no weights can be read from {str(directory)!r}: {error}") from error
    differing = [name for name, shape in shapes.items() if found.get(name) != tuple(shape)]
    if differing:
        name = differing[0]
        raise BackendError(
            f"{str(directory)!r} holds other weights than its config.json says: {len(differing)} of {len(shapes)} "
            f"parameters differ, such as {name!r}, which must be {tuple(shapes[name])} and is "
            f"{found.get(name, 'absent')}; give a whole directory of one model"
        )
