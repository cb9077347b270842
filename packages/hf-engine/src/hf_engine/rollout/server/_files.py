"""Weights on their way to a server: safetensors files in a directory that the ranks and the server share."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from hf_protocols.errors import BackendError

__all__ = ["WeightFiles"]


class WeightFiles:
    """The updates of one run, a folder for each; every rank writes the parameters that are its own.

    Args:
        directory: shared; created with the first update.
        run: name of the run, so that two runs can share the directory.
        rank: this rank.
    """

    def __init__(self, directory: Path, run: str, rank: int) -> None:
        self._home = directory / run
        self._rank = rank
        self._num_files = 0
        self._num_updates = 0

    @property
    def folder(self) -> Path:
        """Of the update that was begun last."""
        return self._home / f"{self._num_updates:06d}"

    @property
    def stamp(self) -> str:
        """Name of that update, unique across runs."""
        return f"{self._home.name}-{self._num_updates}"

    def begin(self) -> None:
        """Starts an update in a new folder, so that no cache of a file system shows a server old files."""
        if self._rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._num_updates += 1
        self._num_files = 0

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Adds one file with whole parameters.

        Raises:
            BackendError: naming the directory, if the operating system refuses.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path = self.folder / f"model-{self._rank:05d}-{self._num_files:05d}.safetensors"
        self._num_files += 1
        on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(on_host, path, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise BackendError(
                f"weights could not be left in {str(path)!r}: {str(error).rstrip('.')}. Choose a "
                "rollout.options.weights_directory with room, that the ranks may write to"
            ) from error

    def close(self) -> None:
        """Removes what this run wrote."""
        if self._rank == 0:
            shutil.rmtree(self._home, ignore_errors=True)
