"""Batches as safetensors files: a dense column as it is, a jagged one as its values and the lengths of its rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hf_algorithms.replay.values import ReplayError

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

__all__ = ["read_batch", "write_batch"]


def write_batch(path: Path, batch: TensorDict) -> None:
    """Writes a batch.

    Raises:
        OSError: if the file cannot be written.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    for name in map(str, batch.keys()):
        column: torch.Tensor = batch[name]
        if column.is_nested:
            rows = list(column.unbind())
            tensors[f"values/{name}"] = torch.cat(rows) if rows else column.values()
            tensors[f"lengths/{name}"] = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        else:
            tensors[f"dense/{name}"] = column
    # contiguous copies: columns may share their memory, which the format refuses
    copies = {key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in tensors.items()}
    try:
        save_file(copies, path, metadata={"rows": str(len(batch))})
    except SafetensorError as error:  # a full disk, among others
        raise OSError(str(error)) from error


def read_batch(path: Path) -> TensorDict:
    """Reads it again.

    Raises:
        ReplayError: if the file is absent or damaged.
    """
    import torch
    from safetensors import SafetensorError, safe_open
    from tensordict import TensorDict

    try:
        with safe_open(path, framework="pt") as file:
            num_rows = int(file.metadata()["rows"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
        columns = {}
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            if kind == "values":
                ends = tensors[f"lengths/{name}"].cumsum(0)
                offsets = torch.cat([ends.new_zeros(1), ends])
                columns[name] = torch.nested.nested_tensor_from_jagged(tensor, offsets)
            elif kind == "dense":
                columns[name] = tensor
        return TensorDict(columns, batch_size=[num_rows])
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ReplayError(f"{path}: cannot be read: {error}") from None
