"""Ray's object store behind the transport's interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from hf_protocols import WorkerError, WorkerTimeoutError

__all__ = ["RayStore"]


class RayStore:
    """Objects in shared memory; a handle is an ObjectRef, and dropping every copy of it frees the object."""

    def put(self, value: Any) -> Any:
        """Store a value; arrays are copied into shared memory once."""
        return ray.put(value)

    def get(self, handles: Sequence[Any], timeout_s: float) -> list[Any]:
        """The values; arrays are views of shared memory.

        Raises:
            WorkerTimeoutError: if one is not there in time.
            WorkerError: if the process that made one is gone.
        """
        try:
            return list(ray.get(list(handles), timeout=timeout_s))
        except GetTimeoutError as error:
            raise WorkerTimeoutError(
                f"{len(handles)} objects of earlier calls were not there after {timeout_s:g} s: "
                "an earlier call hangs, or call_timeout_s is too small"
            ) from error
        except RayError as error:
            raise WorkerError(f"an earlier call's result is lost: {_first_line(error)}") from error

    def wait(self, handles: Sequence[Any], timeout_s: float) -> None:
        """Wait until the values exist, or the process that would make them is gone.

        Raises:
            WorkerTimeoutError: if one is not there in time.
        """
        pending = ray.wait(list(handles), num_returns=len(handles), timeout=timeout_s, fetch_local=False)[1]
        if pending:
            raise WorkerTimeoutError(
                f"the pool's earlier call was not done after {timeout_s:g} s on {len(pending)} rank(s)"
            )


def _first_line(error: RayError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
