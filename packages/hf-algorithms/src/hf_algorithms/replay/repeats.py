"""Calls of an iteration that failed before, on disk while they run: a process that dies in one leaves it there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_algorithms.replay.recorder import CALL, REPLAY, Recorder, describe_replay, write_call
from hf_protocols import StateError, registered_methods
from hf_protocols.foreign_code import Caught

if TYPE_CHECKING:
    from hf_controller import Worker, WorkerContext

__all__ = ["build_recording_worker", "describe_recorded", "drop_states"]

_HAS_FAILED = "has_failed_call"
"""Attribute of a worker: a call of it has failed, and stays on disk though the program may make more calls."""


def build_recording_worker(worker: type[Worker], recorder: Recorder, iterations: Collection[int]) -> type[Worker]:
    """Returns the worker with methods that record their calls in some iterations before they run.

    A call that ends well is forgotten. The state of the model is recorded before updates, where all ranks meet.

    Args:
        worker: of a role.
        recorder: of its run.
        iterations: that failed before.
    """
    methods = {
        name: _recording(getattr(worker, name), recorder, frozenset(iterations), is_update=spec.kind == "training")
        for name, spec in registered_methods(worker).items()
    }
    own = {"__module__": worker.__module__, _HAS_FAILED: False}
    return type(worker.__name__, (worker,), {**own, **methods})


def _recording(
    method: Callable[..., Any], recorder: Recorder, iterations: frozenset[int], *, is_update: bool
) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        from tensordict import TensorDict

        context: WorkerContext = self.context
        iteration = context.labels.get("iteration", 0)
        given = dict(signature(method).bind(self, *args, **kwargs).arguments)
        batch = given.pop("batch", None)
        if iteration not in iterations or not isinstance(batch, TensorDict) or getattr(self, _HAS_FAILED):
            return method(self, *args, **kwargs)
        del given[next(iter(given))]  # the worker
        held = getattr(self, "pretraining", None) if is_update else None
        batches = {"batch": batch, **({} if held is None else {"pretraining": held})}
        save_state = getattr(self, "save_state_apart", None) if is_update else None
        try:
            write_call(recorder, context, method.__name__, given, batches, save_state=save_state)
            note = describe_replay(recorder.run, iteration, context)
        except (OSError, StateError) as problem:
            note = f"the call was not recorded: {problem}"
        with Caught() as caught:
            answer = method(self, *args, **kwargs)
        if (error := caught.error) is not None:
            setattr(self, _HAS_FAILED, True)
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise error
        folder = Path(recorder.run, REPLAY, str(iteration), context.role, f"rank-{context.rank}")
        shutil.rmtree(folder, ignore_errors=True)
        return answer

    return call


def describe_recorded(run: Path, iteration: int) -> str | None:
    """Returns a sentence about the calls of an iteration that are recorded, or None: there are none."""
    found = sorted((run / REPLAY / str(iteration)).glob(f"*/*/{CALL}"))
    if not found:
        return None
    calls = [f"--role {path.parent.parent.name} --rank {path.parent.name.removeprefix('rank-')}" for path in found]
    return (
        f"{REPLAY}/{iteration} holds the calls that had not ended: hybridflow replay {run} --iteration {iteration} "
        f"with {', or '.join(calls)} runs one again"
    )


def drop_states(run: Path, iteration: int) -> None:
    """Removes states that were recorded before calls which then ended well."""
    of_iteration = run / REPLAY / str(iteration)
    for of_role in of_iteration.iterdir() if of_iteration.is_dir() else ():
        if not any(of_role.glob(f"*/{CALL}")):
            shutil.rmtree(of_role, ignore_errors=True)
