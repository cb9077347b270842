"""The parts of a process that all its in-process executors share: one call at a time, and one default process group."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

from hf_controller.groups.default_group import join_default_group
from hf_protocols import ProtocolError, WorkerTimeoutError
from hf_protocols.process_lock import ProcessLock

__all__ = ["DefaultGroup", "taking_turns"]

_TURN = ProcessLock(
    WorkerTimeoutError,
    "another thread's call of an in-process executor was not over after {timeout_s} s, or it waits for this one: in a "
    "process such calls run one at a time. Wait for its end, or use a process of its own for one of them",
)


def taking_turns(timeout_s: float) -> AbstractContextManager[None]:
    """Runs the block while no other thread is in such a block. Blocks of one thread may nest.

    A rank's random numbers, default dtype and process group are those of the whole process while it acts.

    Args:
        timeout_s: how long the block of another thread is waited for.

    Raises:
        WorkerTimeoutError: if it is not over by then.
    """
    return _TURN.held(timeout_s)


class DefaultGroup:
    """torch.distributed's default group of one rank: the first to join makes it, and the last to leave destroys it.

    A group that the program made itself is used, and left as it is. Call both methods within `taking_turns`.
    """

    _made: ClassVar[Any] = None
    """The group that was made here."""
    _users: ClassVar[set[DefaultGroup]] = set()
    """Of that group: it is destroyed when there are none left."""

    def join(self, *, device: str, timeout_s: float) -> None:
        """Uses the process's default group, or makes one; see `join_default_group`.

        Raises:
            ProtocolError: if the process has one of several ranks.
        """
        from torch import distributed

        if not distributed.is_initialized():
            join_default_group(0, 1, device=device, timeout_s=timeout_s)
            DefaultGroup._made = distributed.group.WORLD
            self._users.clear()
        elif distributed.get_world_size() != 1:
            raise ProtocolError(
                f"this process is one of {distributed.get_world_size()} ranks already: the in-process executor needs a "
                "process of its own, started without torchrun"
            )
        if distributed.group.WORLD is self._made:
            self._users.add(self)

    def leave(self) -> None:
        """Stops using the group."""
        if self not in self._users:
            return
        self._users.remove(self)
        if not self._users:
            from torch import distributed

            if distributed.group.WORLD is self._made:
                distributed.destroy_process_group()
            DefaultGroup._made = None
