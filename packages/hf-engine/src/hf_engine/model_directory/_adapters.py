"""Directories that hold a low-rank adapter in peft's format, which is a model together with its base."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hf_engine.model_directory._headers import StoredTensor, read_header
from hf_engine.model_directory._paths import find_model, label_of
from hf_engine.model_directory._weight_files import has_weights
from hf_protocols.errors import ModelError
from hf_protocols.outer_files import read_json_object
from hf_protocols.validation import show

__all__ = ["AdapterDirectory", "find_base", "is_adapter", "read_adapter"]

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.jinja",
    "*.model",
)


@dataclass(frozen=True, kw_only=True)
class AdapterDirectory:
    """An adapter, and the model that it belongs to.

    Attributes:
        label: beginning of messages.
        path: the adapter's directory.
        base: the base's directory.
        is_classifier: the adapter is a sequence classifier's.
    """

    label: str
    path: Path
    base: Path
    is_classifier: bool

    @property
    def tokenizer_files(self) -> list[Path]:
        """Files of the adapter's tokenizer, or of the base's where the adapter lacks one."""
        return _tokenizer_files(self.path) or _tokenizer_files(self.base)

    @property
    def tokenizer(self) -> Path:
        """The directory of `tokenizer_files`."""
        return self.path if _tokenizer_files(self.path) else self.base

    def read_tensors(self) -> dict[str, StoredTensor]:
        """Headers of the adapter's own tensors by name.

        Raises:
            ModelError: as `read_header`.
        """
        try:
            return read_header(self.path / _WEIGHTS)
        except ModelError as error:
            raise ModelError(f"{self.label}: {error}") from None


def find_base(model: str | Path, *, label: str | None = None) -> str | Path:
    """The base's directory of an adapter; any other directory or name as it is.

    Args:
        model: directory or hub name.
        label: what messages begin with; the value given by default.

    Raises:
        ModelError: as `read_adapter`.
    """
    return read_adapter(model, label=label).base if is_adapter(model) else model


def is_adapter(model: str | Path) -> bool:
    """True for a directory with an adapter in peft's format and without a whole model's weights.

    Some trainers save the base's `config.json` with it.
    """
    try:
        path = Path(model).expanduser()
        return (path / _CONFIG).is_file() and not has_weights(path)
    except (OSError, RuntimeError, ValueError):  # of no path, which `find_model` says better
        return False


def read_adapter(model: str | Path, *, label: str | None = None, needs_weights: bool = True) -> AdapterDirectory:
    """Reads which model an adapter belongs to.

    Args:
        model: directory for which `is_adapter` is true.
        label: what messages begin with; the value given by default.
        needs_weights: False fetches of a base on the hub its configuration and tokenizer alone.

    Raises:
        ModelError: for another kind of adapter than LoRA, one without weights, or one whose base is not there.
    """
    name, path = label or label_of(model), Path(model).expanduser()
    try:
        config = read_json_object(ModelError, path / _CONFIG, name=_CONFIG)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from None
    if (kind := config.get("peft_type")) != "LORA":
        raise ModelError(f"{name}: is an adapter with peft_type = {show(kind)}. Give one of LoRA, or a whole model")
    if not (path / _WEIGHTS).is_file():
        raise ModelError(f"{name}: is an adapter without {_WEIGHTS}. Give the directory that peft saved")
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(
            f"{name}: is an adapter, and its {_CONFIG} does not name its base model. Write the base's directory to "
            "base_model_name_or_path there"
        )
    wanted = f"{name}: is an adapter of {show(base)}"
    try:
        found = find_model(base, label=wanted, needs_weights=needs_weights)
    except ModelError as error:
        raise ModelError(f"{error}. Correct base_model_name_or_path in its {_CONFIG}") from None
    if is_adapter(found):
        raise ModelError(f"{wanted}, which is an adapter too. Merge that one into its base first")
    return AdapterDirectory(label=name, path=path, base=found, is_classifier=config.get("task_type") == "SEQ_CLS")


def _tokenizer_files(directory: Path) -> list[Path]:
    return [path for pattern in _TOKENIZER for path in directory.glob(pattern) if path.is_file()]
