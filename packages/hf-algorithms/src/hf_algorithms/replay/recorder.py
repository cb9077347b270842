"""Writes the call of an update that fails, on the rank where it fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from hf_algorithms.atomic_files import write_text
from hf_algorithms.replay.batches import write_batch
from hf_algorithms.replay.values import encode_value
from hf_protocols import NonFiniteLossError, StateError
from hf_protocols.foreign_code import Caught

if TYPE_CHECKING:
    from tensordict import TensorDict

    from hf_controller import WorkerContext

__all__ = [
    "CALL",
    "REPLAY",
    "SCHEMA",
    "STATE",
    "Recorder",
    "SupportsRecording",
    "describe_replay",
    "record_call",
    "write_call",
]

REPLAY = "replay"
"""Folder of a run that holds recorded calls: `replay/<iteration>/<role>/rank-<rank>`."""
CALL = "call.json"
"""Of a recorded call; written last, so that a folder without it is ignored."""
STATE = "state"
"""Folder of a role next to those of its ranks: weights and optimizer as they were before the call."""
SCHEMA = 1

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Recorder:
    """Place in which the calls of a worker are recorded.

    Attributes:
        run: absolute directory of the run, which all ranks share.
        kwargs: with which the worker was constructed.
    """

    run: str
    kwargs: Mapping[str, Any]


class SupportsRecording(Protocol):
    """A worker whose updates are recorded, as each `TrainedWorker` is.

    Attributes:
        recorder: records updates that fail; None: none is recorded.
        has_recorded: an update was recorded.
        pretraining: rows that the next update learns in addition to its batch.
    """

    recorder: Recorder | None
    has_recorded: bool
    pretraining: TensorDict | None

    @property
    def context(self) -> WorkerContext:
        """Place of the worker in its group."""

    def save_state_apart(self, path: str) -> None:
        """Writes the model's state without touching one that is still written. Collective."""


def record_call(method: Method) -> Method:
    """Decorates an update of a worker that supports recording: records a call that fails, and the first skipped one.

    The state of the model is recorded too if all ranks fail alike, for example because of a loss that is not finite:
    all ranks take part in saving a state.
    """

    @wraps(method)
    def call(self: SupportsRecording, batch: TensorDict, *args: Any, **kwargs: Any) -> Any:
        held = self.pretraining
        given = signature(method).bind(self, batch, *args, **kwargs).arguments
        arguments = {name: value for name, value in given.items() if name not in ("self", "batch")}
        batches = {"batch": batch, **({} if held is None else {"pretraining": held})}
        with Caught() as caught:
            metrics = method(self, batch, *args, **kwargs)
        if (error := caught.error) is not None:
            are_alike = isinstance(error, NonFiniteLossError) or self.context.world_size == 1
            if note := _record(self, method.__name__, arguments, batches, error, with_state=are_alike):
                error.add_note(note)
            raise error
        if metrics.get(f"{self.context.role}/skipped_nonfinite", (0.0, 1.0))[0] and not self.has_recorded:
            _record(self, method.__name__, arguments, batches, None, with_state=True)
        return metrics

    return cast("Method", call)


def _record(
    worker: SupportsRecording,
    method: str,
    arguments: Mapping[str, Any],
    batches: Mapping[str, TensorDict],
    error: BaseException | None,
    *,
    with_state: bool,
) -> str:
    """Writes the call; returns a note for the error: how the call is run again, or why it was not recorded."""
    if worker.recorder is None:
        return ""
    worker.has_recorded = True
    save_state = worker.save_state_apart if with_state else None
    try:
        write_call(worker.recorder, worker.context, method, arguments, batches, error=error, save_state=save_state)
    except (OSError, StateError) as problem:
        return f"the call was not recorded: {problem}"
    return describe_replay(worker.recorder.run, worker.context.labels.get("iteration", 0), worker.context)


def write_call(
    recorder: Recorder,
    context: WorkerContext,
    method: str,
    arguments: Mapping[str, Any],
    batches: Mapping[str, TensorDict],
    *,
    error: BaseException | None = None,
    save_state: Callable[[str], None] | None = None,
) -> None:
    """Writes a call; one that was recorded in the same place is gone before.

    Args:
        recorder: of the worker.
        context: of the worker.
        method: that is called.
        arguments: by name, without the batch.
        batches: rows of this rank, by name.
        error: with which the call ended.
        save_state: writes the state of the model into a folder; collective. None: it is not recorded.

    Raises:
        OSError, StateError: if something cannot be written.
    """
    iteration = context.labels.get("iteration", 0)
    of_role = Path(recorder.run, REPLAY, str(iteration), context.role)
    folder = of_role / f"rank-{context.rank}"
    body = {
        "schema": SCHEMA,
        "run": recorder.run,
        "iteration": iteration,
        "role": context.role,
        "rank": context.rank,
        "world_size": context.world_size,
        "method": method,
        "seed": context.seed,
        "arguments": encode_value(arguments),
        "worker": encode_value(recorder.kwargs),
        "error": None if error is None else {"type": type(error).__name__, "message": str(error)},
    }
    if save_state is not None and context.rank == 0:
        shutil.rmtree(of_role / STATE, ignore_errors=True)
    with suppress(OSError):
        (folder / CALL).unlink()
    folder.mkdir(parents=True, exist_ok=True)
    for name, batch in batches.items():
        write_batch(folder / f"{name}.safetensors", batch)
    if save_state is not None:
        save_state(str(of_role / STATE))
    write_text(folder / CALL, json.dumps(body, allow_nan=False, indent=2) + "\n")


def describe_replay(run: str, iteration: int, context: WorkerContext) -> str:
    """Returns the line that says how a recorded call is run again."""
    return (
        f"hybridflow replay {run} --iteration {iteration} --role {context.role} --rank {context.rank} runs "
        "this call again"
    )
