"""Ray's internals that this package uses, all of them: a release of Ray that changes one is met here."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray._private.ray_constants as constants
import ray._private.services as services
import ray._private.worker as worker

__all__ = ["filter_printed", "find_actor_id", "start_workers_without_uv", "starting_by"]


def filter_printed(wrap: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """Has what Ray prints for workers go through a wrapper of its printer, for good: its threads print.

    Args:
        wrap: returns the wrapper, with `__wrapped__`. It is not called a second time.
    """
    if not hasattr(worker.print_to_stdstream, "__wrapped__"):
        worker.print_to_stdstream = wrap(worker.print_to_stdstream)


def find_actor_id(actor: Any) -> str:
    """The id of the actor behind a handle, as the actor's own `ray.get_runtime_context().get_actor_id()` has it."""
    return str(actor._actor_id.hex())


@contextmanager
def starting_by(start: Callable[..., subprocess.Popen[Any]]) -> Iterator[None]:
    """Within the block Ray starts its own processes by `start(popen, *arguments, **options)`, not by `popen` alone."""
    popen: Any = services.ConsolePopen

    def start_one(*arguments: Any, **options: Any) -> subprocess.Popen[Any]:
        return start(popen, *arguments, **options)

    services.ConsolePopen = start_one  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        services.ConsolePopen = popen  # type: ignore[misc]


def start_workers_without_uv() -> None:
    """Turns off Ray's hook for `uv run`, which would ship the tree and start every worker through uv."""
    constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
