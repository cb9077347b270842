"""Hugging Face directories, read box by box and written tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_engine.model_directory import ExportDtype, ExportSource, ModelDirectory, errors_of
from hf_engine.resharding.boxes import Box
from hf_protocols.errors import BackendError
from hf_protocols.validation import show

__all__ = ["HuggingFaceFiles", "HuggingFaceWriter"]

_MAX_FILE_BYTES = 4 << 30


class HuggingFaceFiles:
    """The safetensors files of a directory that transformers would read; only slices of them are read.

    Raises:
        BackendError: if one cannot be read.
    """

    def __init__(self, model: ModelDirectory) -> None:
        self.directory = model.path
        self._tensors = model.tensors
        self._opened: dict[Path, Any] = {}
        for path in {tensor.path for tensor in model.tensors.values()}:
            with errors_of("safetensors", f"{model.label}: {path.name} cannot be read"):
                self._opened[path] = safe_open(path, framework="pt")

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuses a directory of another model.

        Raises:
            BackendError: naming a parameter that differs.
        """
        found = {name: tensor.shape for name, tensor in self._tensors.items()}
        if differing := sorted(name for name, shape in shapes.items() if found.get(name) != tuple(shape)):
            name = differing[0]
            raise BackendError(
                f"{self.directory} holds another model: {len(differing)} parameters differ, such as {show(name)}, "
                f"which is {tuple(shapes[name])} here and {found.get(name, 'absent')} there"
            )

    def read(self, name: str, box: Box) -> torch.Tensor:
        """One box of one parameter, in the file's dtype."""
        opened = self._opened[self._tensors[name].path]
        part: torch.Tensor = opened.get_slice(name)[box.slices_in(Box.whole(box.stop))]
        return part


class HuggingFaceWriter:
    """Writes config and weights into an empty directory, a few gigabytes at a time.

    Args:
        directory: where to write.
        source: of the generation configuration and of dtypes.
        dtype: see `TrainBackend.export_hf`.
        config: the whole of config.json.
    """

    def __init__(self, directory: Path, source: ExportSource, config: Mapping[str, Any], *, dtype: ExportDtype) -> None:
        self._directory = directory
        self._source = source
        self._dtype = dtype
        self._pending: dict[str, torch.Tensor] = {}
        self._files: list[list[str]] = []
        self._total_bytes = 0
        source.write_generation_config(directory)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Takes one whole parameter, and writes it in the dtype of its export.

        Raises:
            OSError: if the file system refuses.
        """
        tensor = tensor.to(getattr(torch, self._source.dtype_of(name, self._dtype)))
        if self._pending and sum(t.nbytes for t in self._pending.values()) + tensor.nbytes > _MAX_FILE_BYTES:
            self._flush()
        self._pending[name] = tensor.contiguous()

    def finish(self) -> None:
        """Writes the rest and the index."""
        self._flush()
        names = [f"model-{number + 1:05d}-of-{len(self._files):05d}.safetensors" for number in range(len(self._files))]
        if len(names) == 1:
            names = ["model.safetensors"]
        for number, name in enumerate(names):
            (self._directory / _part(number)).rename(self._directory / name)
        if len(names) > 1:
            self._write_index(zip(names, self._files, strict=True))

    def _flush(self) -> None:
        try:
            save_file(self._pending, self._directory / _part(len(self._files)), metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk, among others
            raise OSError(str(error)) from error
        self._files.append(list(self._pending))
        self._total_bytes += sum(tensor.nbytes for tensor in self._pending.values())
        self._pending = {}

    def _write_index(self, files: Iterable[tuple[str, list[str]]]) -> None:
        index = {
            "metadata": {"total_size": self._total_bytes},
            "weight_map": {parameter: file for file, parameters in files for parameter in parameters},
        }
        text = json.dumps(index, indent=2) + "\n"
        (self._directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _part(number: int) -> str:
    return f"part-{number:05d}.safetensors"
