"""What went wrong on a rank, as a value that travels, and the exception it becomes on the controller."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass, field
from typing import Any

from hf_protocols import HybridFlowError, WorkerError

__all__ = ["CLOSED", "Failure", "LostResultError", "RemoteCallError", "UpstreamFailure"]

CLOSED = "this executor is closed: make another, and ask for results before the end of its `with` block"


class RemoteCallError(WorkerError):
    """An exception in a worker's method, or the death of its process.

    Attributes:
        role: the role whose call failed.
        method: the method that was called.
        rank: the first rank that failed.
        cause_type: class name of the exception there, or what became of the process.
        remote_traceback: the traceback there, or of a rank that lives where this one died; empty if there is none.
    """

    def __init__(
        self, message: str, *, role: str, method: str, rank: int, cause_type: str, remote_traceback: str
    ) -> None:
        super().__init__(message)
        self.role = role
        self.method = method
        self.rank = rank
        self.cause_type = cause_type
        self.remote_traceback = remote_traceback


class LostResultError(WorkerError):
    """An earlier call's result cannot be read any more.

    Attributes:
        maker: the process that made it, as :attr:`Failure.origin` names it; empty where that is not known.
    """

    def __init__(self, message: str, maker: str = "") -> None:
        super().__init__(message)
        self.maker = maker


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One rank's failed call.

    ``pickled`` is the exception where it is one of our own tree, else empty; ``exception`` is it, in its own process.
    ``origin`` is the call or process that failed, such as ``"call 12"``, and stays where later calls pass it on.
    ``lost_from`` is the ``maker`` of a :class:`LostResultError`, and None for all other exceptions.
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
    exception: BaseException | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "exception": None}

    @classmethod
    def of(cls, error: BaseException, *, role: str, method: str, rank: int, origin: str = "") -> Failure:
        """Describe ``error``, raised by ``role.method`` on ``rank``."""
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
            exception=error,
        )

    def to_error(self) -> HybridFlowError:
        """The exception to raise on the controller: of the same class where it is ours, else RemoteCallError.

        The remote traceback is attached once, as a note.
        """
        where = f"{self.role}.{self.method} on rank {self.rank}"
        error = _unpickle_own(self.pickled)
        if error is None:
            cause = f"{self.cause_type}: {self.message}" if self.message else self.cause_type
            error = RemoteCallError(
                f"{where} failed: {cause}",
                role=self.role,
                method=self.method,
                rank=self.rank,
                cause_type=self.cause_type,
                remote_traceback=self.remote_traceback,
            )
        if self.remote_traceback:
            error.add_note(f"{where}, traceback there:\n{self.remote_traceback.rstrip()}")
        return error


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as raised:  # noqa: BLE001 - a user's exception may fail in any way
        return f"(its message cannot be shown: str() raised {type(raised).__name__})"


class UpstreamFailure(Exception):  # noqa: N818 - it carries another call's failure and is never shown itself
    """Raised inside a rank when an input's own call failed: that first failure is passed on, not a new one."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def _pickle_own(error: BaseException) -> bytes:
    """The pickled exception if it is of our tree and survives the round trip, else nothing."""
    if not isinstance(error, HybridFlowError) or isinstance(error, RemoteCallError):
        return b""
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # noqa: BLE001 - a user's exception may fail in any way
        return b""
    return pickled


def _unpickle_own(pickled: bytes) -> HybridFlowError | None:
    if not pickled:
        return None
    try:
        error = pickle.loads(pickled)
    except Exception:  # noqa: BLE001 - a user's exception may fail in any way
        return None
    return error if isinstance(error, HybridFlowError) else None
