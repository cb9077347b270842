"""Runs a recorded call again, in one process."""

from __future__ import annotations

import inspect
import pdb
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_algorithms.checkpoints.commit import STEPS, CheckpointError, find_commits, read_commit
from hf_algorithms.checkpoints.origin import read_origin
from hf_algorithms.replay.values import ReplayError
from hf_protocols import registered_methods
from hf_protocols.foreign_code import Caught
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_algorithms.config import Config
    from hf_algorithms.replay.bundle import RecordedCall
    from hf_controller import WorkerSpec

__all__ = ["run_again"]


def run_again(
    run: Path, call: RecordedCall, *, debug: bool = False, note: Callable[[str], None] = print
) -> dict[str, float]:
    """Builds the call's worker as one rank with the weights that it had, and calls its method with what it received.

    A model's weights are loaded where it has some. The columns that a call returns are shown by their names.

    An update that the run would leave out is an error here. Rows of other ranks are not part of the call.

    Args:
        run: directory of the run.
        call: recorded there.
        debug: stops in the method's first line, and where it raises.
        note: shows a line.

    Returns:
        The metrics of the call.

    Raises:
        HybridFlowError: if the call cannot be made, or fails as it did.
    """
    from hf_algorithms.config import parse_config
    from hf_controller import InProcessExecutor, ResourcePool

    origin = read_origin(run)
    config = parse_config(dict(origin.sections), search_path=origin.search_path, command=None)
    spec = _build_spec(config, call, debug=debug)
    batches, arguments = call.read_batches(), call.read_arguments()
    has_model = "load_state" in registered_methods(spec.worker)
    state, said = _find_state(run, call) if has_model else (None, "of a role that has no model")
    note(
        f"{call.role}.{call.method} of rank {call.rank} in iteration {call.iteration}: {len(batches['batch'])} rows, "
        f"{said}"
    )
    pool = ResourcePool([1], device="cpu" if config.cluster.gpu == "cpu" else "cuda", name="replay")
    with InProcessExecutor() as executor:
        group = executor.build_groups(pool, {call.role: spec})[call.role]
        if state is not None:
            group.load_state(str(state)).result()
        if "pretraining" in batches:
            group.hold_pretraining(executor.put(batches["pretraining"])).result()
        with Caught() as caught:
            found = getattr(group, call.method)(executor.put(batches["batch"]), **arguments).result()
        if caught.error is not None:
            if debug and caught.error.__cause__ is not None:
                pdb.post_mortem(caught.error.__cause__.__traceback__)
            raise caught.error
    if isinstance(found, dict) and all(isinstance(each, float) for each in found.values()):
        return found
    note(f"returned {_describe(found)}")
    return {}


def _build_spec(config: Config, call: RecordedCall, *, debug: bool) -> WorkerSpec:
    """The worker of one rank. Of generation it needs nothing, so the engine at hand stands in for another."""
    from hf_controller import WorkerSpec
    from hf_protocols import GenerationSpec, ParallelSpec, Topology

    if call.role not in {role.name for role in config.recipe.roles}:
        raise ReplayError(f"{call.folder}: the recipe has no role {show(call.role)}. Its configuration was changed")
    worker = config.recipe.role(call.role).load_worker()
    if not callable(getattr(worker, call.method, None)):
        raise ReplayError(f"{call.folder}: {worker.__name__} has no method {show(call.method)}")
    kwargs = call.read_worker()
    if "training" in kwargs:
        kwargs |= {"offload": False, "training": replace(kwargs["training"], on_nonfinite="stop")}
    if "rollout" in kwargs:
        kept = {name: value for name, value in kwargs.get("rollout_options", {}).items() if name == "lora"}
        kwargs |= {"rollout": "transformers", "rollout_options": kept}
    topology = Topology(ParallelSpec(), GenerationSpec())
    return WorkerSpec(
        worker=_stopping(worker, call.method) if debug else worker, topology=topology, kwargs=kwargs, seed=call.seed
    )


def _stopping(worker: type[Any], method: str) -> type[Any]:
    """The worker with a method in whose first line a debugger stops."""
    registered = getattr(worker, method)
    written = inspect.unwrap(registered)

    @wraps(registered)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return pdb.Pdb(nosigint=True).runcall(written, self, *args, **kwargs)

    return type(worker.__name__, (worker,), {method: call})


def _describe(found: Any) -> str:
    """Returns a description of a result that has no metrics."""
    if hasattr(found, "batch_size"):
        return f"{len(found)} rows with {', '.join(sorted(map(str, found.keys())))}"
    return show(found)


def _find_state(run: Path, call: RecordedCall) -> tuple[Path | None, str]:
    """The state of the model before the call, or else the nearest one, and what is said of it."""
    if call.state is not None:
        return call.state, "with the weights that it had"
    for iteration in reversed([each for each in find_commits(run) if each < call.iteration]):
        commit = read_commit(run / STEPS / str(iteration))
        try:
            commit.verify()
        except CheckpointError:
            continue
        if (commit.folder / call.role).is_dir():
            return commit.folder / call.role, f"with the weights of {STEPS}/{iteration}: its own were not recorded"
    return None, "with the weights of the model's files: its own were not recorded"
