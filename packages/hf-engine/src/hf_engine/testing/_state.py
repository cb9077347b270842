"""A state's files, read by safetensors alone and put together by the boxes that `state.json` names."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

__all__ = ["read_whole_state"]


def read_whole_state(directory: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Whole weights and moments, by kind and by Hugging Face name.

    Raises:
        AssertionError: if an element is stored twice or not at all, or a file holds what no box names.
    """
    described = json.loads((directory / "state.json").read_text(encoding="utf-8"))
    whole = {
        kind: {name: torch.full(shape, torch.nan) for name, shape in described["parameters"].items()}
        for kind in described["kinds"]
    }
    for kind, tensors in whole.items():
        for rank, stored in enumerate(described["ranks"]):
            path = directory / f"{kind}-{rank:05d}.safetensors"
            found = load_file(path) if stored["boxes"] else {}
            for name, boxes in stored["boxes"].items():
                for offset, shape in boxes:
                    key = name if len(boxes) == 1 else f"{name}@{','.join(map(str, offset))}"
                    place = tensors[name][tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))]
                    assert place.isnan().all(), f"{kind} of {name} are stored twice"
                    place.copy_(found.pop(key))
            assert not found, f"{path} holds {sorted(found)}, which state.json does not name"
        lacking = [name for name, tensor in tensors.items() if tensor.isnan().any()]
        assert not lacking, f"{kind} of {lacking} are not stored"
    return whole
