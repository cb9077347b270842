"""Weights & Biases: a run in `wandb/` of the run's directory, sent to a server where there is one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import wandb

from hf_algorithms.trackers._tracker import EXPERIMENT, RunFacts, Status
from hf_algorithms.url_secrets import hide_secrets
from hf_protocols.foreign_code import Caught

__all__ = ["WandbTracker"]

_CONNECT_S = 30.0
_FINISH_S = 20.0
"""For what is left to send; the run's directory keeps it all the same."""


class WandbTracker:
    """A W&B run. Its library would also send output, source files, arguments and the host's name: it may not.

    `WANDB_MODE`, `WANDB_PROJECT`, `WANDB_ENTITY` and other variables of the library are obeyed. Without a key or a
    network the run is kept on disk.
    """

    def start(self, run: RunFacts) -> str | None:
        """Begins a run online if that is possible, and else offline."""
        if os.environ.get("WANDB_MODE"):
            self._run = self._begin(run, None)
            return None
        reason = None
        with Caught() as caught:  # of many classes: no network, a wrong key, a server that refuses
            reason = None if wandb.login(prompt=False) else "no API key was found (`wandb login` stores one)"
            if reason is None:
                self._run = self._begin(run, "online")
        if caught.error is not None:
            reason = hide_secrets(str(caught.error).partition("\n")[0])
        if reason is None:
            return None
        self._run = self._begin(run, "offline")
        folder = os.path.dirname(self._run.dir)
        return f"wandb: the run is kept offline, because {reason}. Send it later: wandb sync {folder}"

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Adds a row of the history."""
        self._run.log(dict(metrics), step=iteration)

    def finish(self, status: Status, summary: Mapping[str, Any], iteration: int) -> None:
        """Ends the run; W&B shows one with an exit code other than 0 as failed."""
        self._run.summary.update({"status": status, **summary})
        self._run.finish(exit_code=0 if status == "finished" else 1)

    def _begin(self, run: RunFacts, mode: str | None) -> Any:
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", EXPERIMENT),
            name=run.name,
            config=dict(run.config),
            dir=os.environ.get("WANDB_DIR", str(run.directory)),
            mode=mode,
            settings=wandb.Settings(
                console="off",
                disable_code=True,
                disable_git=True,
                disable_job_creation=True,
                finish_timeout=_FINISH_S,
                init_timeout=_CONNECT_S,
                reinit="create_new",  # a run that the user's own program has open stays open
                save_code=False,
                silent=True,
                x_disable_machine_info=True,
                x_disable_meta=True,
                x_save_requirements=False,
            ),
        )
