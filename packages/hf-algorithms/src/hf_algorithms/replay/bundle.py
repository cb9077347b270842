"""A recorded call as its files have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_algorithms.checkpoints.origin import move_paths
from hf_algorithms.replay.batches import read_batch
from hf_algorithms.replay.recorder import CALL, REPLAY, SCHEMA, STATE
from hf_algorithms.replay.values import ReplayError, decode_value
from hf_protocols.outer_files import read_json_object
from hf_protocols.validation import show

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["RecordedCall", "ReplayError", "find_bundle"]


@dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """One call of one rank.

    Attributes:
        folder: where it lies.
        iteration: of the run; 0 in a warm start.
        role: whose worker was called.
        rank: of the worker.
        world_size: ranks of the role.
        method: that was called.
        seed: of the role.
    """

    folder: Path
    iteration: int
    role: str
    rank: int
    world_size: int
    method: str
    seed: int
    _arguments: Any
    _worker: Any

    @property
    def state(self) -> Path | None:
        """The model's state before the call, if all ranks could save it."""
        path = self.folder.parent / STATE
        return path if (path / "state.json").is_file() else None

    def read_batches(self) -> dict[str, TensorDict]:
        """Returns the rows that the rank received: `batch`, and `pretraining` where it held such rows.

        Raises:
            ReplayError: if a file cannot be read.
        """
        paths = {name: self.folder / f"{name}.safetensors" for name in ("batch", "pretraining")}
        return {name: read_batch(path) for name, path in paths.items() if name == "batch" or path.exists()}

    def read_arguments(self) -> dict[str, Any]:
        """Returns the other arguments by name.

        Raises:
            ReplayError: for one that was not recorded, or whose code is not there.
        """
        return self._decode(self._arguments, "arguments")

    def read_worker(self) -> dict[str, Any]:
        """Returns the arguments of the worker's constructor.

        Raises:
            ReplayError: as `read_arguments` does.
        """
        return self._decode(self._worker, "worker")

    def _decode(self, body: Any, name: str) -> dict[str, Any]:
        label = f"{self.folder / CALL}: {name}"
        found = decode_value(body, label)
        if not isinstance(found, dict):
            raise ReplayError(f"{label} are not a mapping of names")
        return found


def find_bundle(run: Path, iteration: int, role: str, rank: int) -> RecordedCall:
    """Reads a recorded call of a run, which may have been moved.

    Raises:
        ReplayError: if there is none, with those that there are; or if it cannot be read.
    """
    known = {
        (path.parent.parent.parent.name, path.parent.parent.name, path.parent.name): path.parent
        for path in sorted((run / REPLAY).glob(f"*/*/rank-*/{CALL}"))
    }
    folder = known.get((str(iteration), role, f"rank-{rank}"))
    if folder is None:
        there = "; ".join(f"iteration {k}, role {r}, {n.replace('-', ' ')}" for k, r, n in known)
        raise ReplayError(
            f"{run}: no call of iteration {iteration}, role {show(role)}, rank {rank} is recorded. "
            f"Recorded calls: {there or 'none. Name the run.output_dir of a run in which a call failed'}"
        )
    body = read_json_object(ReplayError, folder / CALL)
    if body.get("schema") != SCHEMA:
        raise ReplayError(f"{folder / CALL}: has schema {show(body.get('schema'))}, this version reads {SCHEMA}")
    try:
        before = str(body["run"])
        return RecordedCall(
            folder=folder,
            iteration=iteration,
            role=role,
            rank=rank,
            world_size=int(body["world_size"]),
            method=str(body["method"]),
            seed=int(body["seed"]),
            _arguments=move_paths(_mapping(body["arguments"]), before, str(run.resolve())),
            _worker=move_paths(_mapping(body["worker"]), before, str(run.resolve())),
        )
    except (LookupError, TypeError, ValueError) as error:
        raise ReplayError(f"{folder / CALL}: is damaged: {type(error).__name__}: {error}") from None


def _mapping(body: Any) -> Mapping[str, Any]:
    if not isinstance(body, Mapping):
        raise TypeError(f"{show(body)} is not a mapping")
    return body
