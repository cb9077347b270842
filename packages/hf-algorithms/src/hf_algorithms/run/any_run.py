"""Runs of every recipe by one function, for commands and Python."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_algorithms.models.initial_model import without_progress
from hf_algorithms.recipes import SupervisedRecipe
from hf_algorithms.run.loop import run_training
from hf_algorithms.run.supervised import run_supervised
from hf_algorithms.torch_notices import hush_torch
from hf_controller import Terminated

if TYPE_CHECKING:
    from hf_algorithms.checkpoints import Resumption
    from hf_algorithms.config import Config
    from hf_algorithms.run_directory import RunDirectory
    from hf_algorithms.trackers import MetricsHook
    from hf_protocols import MappingPlan

__all__ = ["run_recipe"]


def run_recipe(
    config: Config,
    directory: RunDirectory,
    *,
    plan: MappingPlan | None = None,
    search_path: Sequence[str] = (),
    on_metrics: MetricsHook | None = None,
    resume: Resumption | None = None,
) -> dict[str, Any]:
    """Runs the recipe of a configuration, of any command; see `run_training` and `run_supervised`.

    Returns:
        The contents of `summary.json`, also where `run.max_seconds` has ended the run in the middle of an iteration.
    """
    run = run_supervised if isinstance(config.recipe, SupervisedRecipe) else run_training
    hush_torch()
    try:
        with without_progress():
            return run(config, directory, plan=plan, search_path=search_path, on_metrics=on_metrics, resume=resume)
    except Terminated as end:
        if end.code != 0:
            raise
    found: dict[str, Any] = json.loads((directory.path / "summary.json").read_text(encoding="utf-8"))
    return found
