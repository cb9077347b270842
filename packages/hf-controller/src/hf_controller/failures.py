"""Failure on a rank, as a value that travels, and the exception it becomes on the controller."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hf_protocols import HybridFlowError, PoolError, WorkerError
from hf_protocols.foreign_code import Caught

__all__ = [
    "CLOSED",
    "Deadline",
    "Failure",
    "LostClusterError",
    "LostResultError",
    "RemoteCallError",
    "UpstreamFailure",
    "describe_end",
    "diagnosed",
    "went_alike",
]

CLOSED = "this executor is closed. Make another, and ask for results before the end of its `with` block"


class Deadline(NamedTuple):
    """Time that a call may take, counted from the end of everything that it waits for.

    Attributes:
        seconds: the time.
        key: the name of what sets it, for messages: `"deadlines.train_s"`.
    """

    seconds: float
    key: str


class RemoteCallError(WorkerError):
    """An exception in a worker's method, or the death of its process.

    Attributes:
        role: the role whose call failed.
        method: the method that was called.
        rank: the first rank that failed.
        cause_type: class name of the exception there; empty where the process ended.
        remote_traceback: the traceback there; empty if there is none.
        exit_code: of a process that ended by itself, where the system says.
        signal: the number of the signal that ended a process, where the system says.
    """

    def __init__(
        self,
        message: str,
        *,
        role: str,
        method: str,
        rank: int,
        cause_type: str,
        remote_traceback: str,
        exit_code: int | None = None,
        signal: int | None = None,
    ) -> None:
        super().__init__(message)
        self.role = role
        self.method = method
        self.rank = rank
        self.cause_type = cause_type
        self.remote_traceback = remote_traceback
        self.exit_code = exit_code
        self.signal = signal


class LostClusterError(PoolError):
    """A Ray cluster of which a process is gone, or does not answer any more.

    Attributes:
        is_local: the executor has started the cluster itself, and a new executor starts a new one.
    """

    def __init__(self, message: str, *, is_local: bool) -> None:
        super().__init__(message)
        self.is_local = is_local


class LostResultError(WorkerError):
    """An earlier call's result cannot be read any more.

    Attributes:
        maker: the process that made it, as `Failure.origin` names it; empty where that is not known.
    """

    def __init__(self, message: str, maker: str = "") -> None:
        super().__init__(message)
        self.maker = maker


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One rank's failed call.

    `pickled` is the exception if its class is in our own tree, else empty. `exception` is the exception object, which
    stays in its own process. `origin` is the call or process that failed, such as `"call 12"`; it stays the same if
    later calls pass the failure on. `lost_from` is the `maker` of a `LostResultError`, and None for all other
    exceptions. `has_returned` is True if the method had returned: no other rank waits for this one in it. `note` says
    that a group ended, and how to build it again. `exit_code` and `signal` describe the end of a process.
    """

    role: str
    method: str
    rank: int
    cause_type: str
    message: str
    remote_traceback: str
    pickled: bytes = b""
    origin: str = ""
    lost_from: str | None = None
    has_returned: bool = False
    note: str = ""
    exit_code: int | None = None
    signal: int | None = None
    exception: BaseException | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "exception": None}

    @property
    def is_refusal(self) -> bool:
        """True for an error of our own tree: if all ranks of a call raise such an error, they agreed and continue."""
        return bool(self.pickled)

    @classmethod
    def of(
        cls,
        error: BaseException,
        *,
        role: str,
        method: str,
        rank: int,
        origin: str = "",
        has_returned: bool = False,
    ) -> Failure:
        """Describes `error`, raised by `role.method` on `rank`."""
        return cls(
            role=role,
            method=method,
            rank=rank,
            cause_type=type(error).__name__,
            message=_message_of(error),
            remote_traceback="".join(traceback.format_exception(error)),
            pickled=_pickle_own(error),
            origin=origin,
            lost_from=error.maker if isinstance(error, LostResultError) else None,
            has_returned=has_returned,
            exception=error,
        )

    def to_error(self) -> HybridFlowError:
        """The exception to raise on the controller: of the same class where it is ours, else RemoteCallError.

        The remote traceback is attached once, as a note.
        """
        where = f"{self.role}.{self.method} on rank {self.rank}"
        error = _unpickle_own(self.pickled)
        if error is None:
            cause = ": ".join(part for part in (self.cause_type, self.message) if part)
            error = RemoteCallError(
                f"{where} failed: {cause}",
                role=self.role,
                method=self.method,
                rank=self.rank,
                cause_type=self.cause_type,
                remote_traceback=self.remote_traceback,
                exit_code=self.exit_code,
                signal=self.signal,
            )
        if self.remote_traceback:
            error.add_note(f"{where}, traceback there:\n{self.remote_traceback.rstrip()}")
        if self.note:
            error.add_note(self.note)
        return error


def went_alike(called: Collection[int], failures: Mapping[int, Failure], passed_on: Collection[int]) -> bool:
    """Returns True if all ranks of a finished call got equally far, so that no collective is half done.

    Either every rank refused or passed on the failure of an input, or every rank returned from the method, with any
    result.

    Args:
        called: the called ranks.
        failures: of those that failed.
        passed_on: the ranks that failed because an input's own call did.
    """
    through = [rank for rank in called if rank not in failures or failures[rank].has_returned]
    refused = [rank for rank, each in failures.items() if not each.has_returned]
    are_ours = all(rank in passed_on or failures[rank].is_refusal for rank in refused)
    return are_ours and not (through and refused)


def describe_end(roles: Sequence[str], others: str, pools: Iterable[str]) -> str:
    """Describes the consequences of a group's first failure for the group."""
    built = ", ".join(repr(pool) for pool in dict.fromkeys(pools))
    group = f"the group{'s' * (len(roles) > 1)} {', '.join(roles)} ended with it{others}"
    return f"{group}. rebuild(executor, [pool]) builds the groups of pool {built} again"


def diagnosed(build: Callable[[], str]) -> str:
    """Returns the text that `build` makes about an error, or a note of its own failure: it never replaces the error."""
    with Caught() as caught:  # of processes in any state
        return build()
    return f"(more could not be found out: {type(caught.error).__name__}: {caught.error})"


def _message_of(error: BaseException) -> str:
    with Caught() as caught:
        return str(error)
    return f"(its message cannot be shown: str() raised {type(caught.error).__name__})"


class UpstreamFailure(Exception):  # noqa: N818 - it carries another call's failure and is never shown itself
    """Raised inside a rank when an input's own call failed: that first failure is passed on, not a new one."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def _pickle_own(error: BaseException) -> bytes:
    """The pickled exception if it is of our tree and survives the round trip, else nothing."""
    if not isinstance(error, HybridFlowError) or isinstance(error, RemoteCallError):
        return b""
    with Caught():
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
        return pickled
    return b""


def _unpickle_own(pickled: bytes) -> HybridFlowError | None:
    if not pickled:
        return None
    with Caught():
        error = pickle.loads(pickled)
        return error if isinstance(error, HybridFlowError) else None
    return None
