"""The transition of a 7B bfloat16 model on one GPU: into generation buffers and back, against the copy bandwidth.

One rank trains and generates with the whole model, so nothing is received: what remains is to move every parameter
into its generation buffer and to free the training storage, and the way back. The floor copies the same tensors into
tensors that are there already. Peaks are the CUDA allocator's; the stated peak
is the model and its largest parameter, which is there twice while it is copied.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hf_engine import ReshardExecutor, plan_reshard, replicated_layout
from hf_engine.resharding.digest import compute_digest
from hf_engine.resharding.moving import ShardMover, storage_bytes
from hf_protocols import ModelShape

__all__ = ["measure"]

NUM_ROUNDS = 7


def measure(model: ModelShape, device: torch.device, num_rounds: int = NUM_ROUNDS) -> dict[str, Any]:
    """Seconds of every round by kind, the peak, and whether the weights that came back are those that went."""
    shapes = model.parameters()
    layout = replicated_layout(shapes, [0], dtype="bfloat16")
    train = {name: [torch.randn(shape, dtype=torch.bfloat16, device=device)] for name, shape in shapes.items()}
    generation = {name: [torch.empty(shape, dtype=torch.bfloat16, device=device)] for name, shape in shapes.items()}
    digests = {name: compute_digest(parts[0]) for name, parts in train.items()}
    model_bytes = layout.held_bytes(0)
    found: dict[str, Any] = {"copy": [], "move": [], "restore": [], "model_bytes": model_bytes}

    def copy() -> None:
        for name, (source,) in train.items():
            generation[name][0].copy_(source)

    for _ in range(num_rounds + 1):
        found["copy"].append(_seconds(copy, device))
    with tempfile.TemporaryDirectory() as directory, _one_rank(directory):
        plan = plan_reshard(layout, layout)
        executor = ReshardExecutor(plan, device=device)
        mover = ShardMover(plan, 0, train, generation)
        mover.restore()
        others = _allocated(device) - storage_bytes([part for (part,) in train.values()])
        _reset_peak(device)
        for version in range(num_rounds + 1):
            found["move"].append(
                _seconds(lambda v=version: executor.run(train, generation, version=v, mover=mover), device)
            )
            assert storage_bytes([part for (part,) in train.values()]) == 0
            found["restore"].append(_seconds(mover.restore, device))
    found["peak_bytes"] = _peak(device) - others
    # The allocator rounds every tensor up to 512 bytes, and serves large ones from blocks of 2 MiB.
    found["planned_peak_bytes"] = executor.peak_bytes(mover) + len(train) * (2 << 20)
    found["is_equal"] = digests == {name: compute_digest(parts[0]) for name, parts in train.items()}
    for name in ("copy", "move", "restore"):
        del found[name][0]  # the first one warms up
    return found


class _one_rank:  # noqa: N801 - read as a statement
    """A process group of this process alone."""

    def __init__(self, directory: str) -> None:
        self._store = f"file://{directory}/store"

    def __enter__(self) -> None:
        dist.init_process_group("gloo", init_method=self._store, rank=0, world_size=1)

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
