"""Files of the source model that an export keeps: configuration, dtypes and the generation configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from hf_protocols.errors import BackendError
from hf_protocols.validation import Checks

if TYPE_CHECKING:
    from pathlib import Path

    from hf_engine.model_directory._directory import ModelDirectory

__all__ = ["ExportDtype", "ExportSource", "check_export_dtype", "describe_export"]

_check = Checks(BackendError)

ExportDtype = Literal["source", "float32", "bfloat16", "float16"]
"""dtype of exported weights; `source`: the one that each tensor has in the source's files."""

_GENERATION = "generation_config.json"
_STALE = ("_name_or_path", "compression_config", "quantization_config", "torch_dtype")
"""Of the source's files, not of what is written."""
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_KNOWN = ("source", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ExportSource:
    """The files that a model was loaded from, as its exports need them; read once, so that they may go.

    Attributes:
        config: keys of `config.json`.
        dtypes: of every tensor of floats, by its name in the files and torch's name for the dtype.
        num_bytes: of the same tensors.
        generation_config: content of `generation_config.json`; None without one.
    """

    config: Mapping[str, Any]
    dtypes: Mapping[str, str]
    num_bytes: Mapping[str, int]
    generation_config: bytes | None

    @classmethod
    def of(cls, files: ModelDirectory) -> ExportSource:
        """Reads what exports of a model keep.

        Raises:
            OSError: if the generation configuration cannot be read.
        """
        path = files.path / _GENERATION
        floats = {name: tensor for name, tensor in files.tensors.items() if tensor.dtype in _FLOATS}
        return cls(
            config=files.config,
            dtypes={name: _FLOATS[tensor.dtype] for name, tensor in floats.items()},
            num_bytes={name: tensor.stop - tensor.start for name, tensor in floats.items()},
            generation_config=path.read_bytes() if path.is_file() else None,
        )

    @cached_property
    def main_dtype(self) -> str:
        """The dtype of most bytes."""
        count: Counter[str] = Counter()
        for name, dtype in self.dtypes.items():
            count[dtype] += self.num_bytes[name]
        return max(count, key=lambda dtype: (count[dtype], dtype), default="float32")

    def dtype_of(self, name: str, dtype: str) -> str:
        """The dtype in which a tensor of floats is exported.

        A tensor that the source holds in another dtype than most keeps it, for any `dtype`. One that the source
        lacks, such as a value head, has the dtype of most.

        Args:
            name: in the files; the model's own prefix may be absent in the source's.
            dtype: an `ExportDtype`.
        """
        stated = self.dtypes.get(name) or self.dtypes.get(name.partition(".")[2]) or self.main_dtype
        return stated if dtype == "source" or stated != self.main_dtype else dtype

    def write_generation_config(self, directory: Path) -> None:
        """Writes `generation_config.json` byte for byte, if the source has one.

        Raises:
            OSError: if the file system refuses.
        """
        if self.generation_config is not None:
            (directory / _GENERATION).write_bytes(self.generation_config)


def check_export_dtype(dtype: object) -> None:
    """Refuses a dtype in which no model is exported.

    Raises:
        BackendError: naming those that there are.
    """
    _check.one_of("dtype", dtype, _KNOWN)


def describe_export(config: Mapping[str, Any], *, dtype: str, vocab_size: int, ties_embeddings: bool) -> dict[str, Any]:
    """Returns the `config.json` that belongs next to exported tensors.

    Args:
        config: the source's.
        dtype: of most tensors, by torch's name.
        vocab_size: rows of the embedding.
        ties_embeddings: whether the output layer is the embedding, and no tensor of its own.
    """
    written = {key: value for key, value in config.items() if key not in _STALE}
    written |= {"dtype": dtype, "tie_word_embeddings": ties_embeddings}
    if "text_config" not in written:
        written["vocab_size"] = vocab_size
    if written.get("num_nextn_predict_layers"):
        written["num_nextn_predict_layers"] = 0
    return written
