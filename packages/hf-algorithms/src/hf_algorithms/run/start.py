"""The first files of a run: what its inputs may not be, and what lies in its directory before workers start."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hf_algorithms.checkpoints.origin import describe_origin, write_origin
from hf_algorithms.config import Config, format_toml
from hf_algorithms.models.adapters import MERGED_MODELS, keep_merged_models
from hf_algorithms.preflight.inputs import ModelInputs

if TYPE_CHECKING:
    from hf_algorithms.checkpoints import Resumption
    from hf_algorithms.run_directory import RunDirectory
    from hf_protocols import MappingPlan

__all__ = ["begin_run", "check_inputs"]

Inputs = TypeVar("Inputs", bound=ModelInputs)


def check_inputs(config: Config, directory: RunDirectory) -> None:
    """Refuses inputs that the run's own files would replace."""
    data, model = config.data, config.model
    paths = {f"data.{key}": getattr(data, key) for key in ("validation", "test", "pretraining")}
    sources = data.sources_of("train")
    paths |= {"data.train" if len(sources) == 1 else f"data.train, {path}": path for path, _ in sources}
    paths |= {f"{section}.model.path": path for section, path in config.scorer_paths.items()}
    paths |= {f"evaluation[{number}].data": each.data for number, each in enumerate(config.evaluation)}
    paths |= {f"roles.{name}.path": role.path for name, role in config.roles.items()}
    directory.check_inputs({**paths, "model.path": model.path, "model.tokenizer": model.tokenizer})


def begin_run(
    config: Config,
    directory: RunDirectory,
    plan: MappingPlan,
    inputs: Inputs,
    fresh: Path,
    *,
    search_path: Sequence[str],
    resume: Resumption | None,
) -> tuple[Inputs, Callable[[], None]]:
    """Replaces an earlier run's files by this run's first ones; of the inputs, a fresh model moves there.

    A run that goes on keeps what it wrote until its last commit.

    Returns:
        The inputs, and what writes down the configuration unless it is written. A run that goes on from a commit calls
        it when its roles have loaded the states: if these are of another model, the run can still go on as it was.
    """
    origin, text = describe_origin(config, directory.path, search_path), format_toml(config)
    is_recorded = False

    def record() -> None:
        nonlocal is_recorded
        if is_recorded:
            return
        is_recorded = True
        directory.write_text("config.toml", text)
        directory.write_text("plan.json", plan.to_json())
        write_origin(directory, origin)  # comes last: a run that has one can go on

    directory.begin()
    if resume is not None:
        resume.begin()
    if resume is None or not resume.has_state:
        record()
    if inputs.model.tokenizer_path == str(fresh):
        with directory.replacing("initial_model") as folder:
            shutil.move(fresh, folder)
        inputs = inputs.moved(str(fresh), str(directory.path / "initial_model"))
    return keep_merged_models(directory, inputs, fresh.with_name(MERGED_MODELS)), record
