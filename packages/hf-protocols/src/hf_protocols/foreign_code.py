"""The border to third-party code, which may raise anything: users' functions, and libraries that read damaged files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from hf_protocols.errors import HybridFlowError

__all__ = ["Caught", "raised_as"]

_Kinds = tuple[type[BaseException], ...]


@contextmanager
def raised_as(describe: Callable[[BaseException], Exception], *, also: _Kinds = (), but: _Kinds = ()) -> Iterator[None]:
    """Turns an exception of the block into one of our errors.

    Errors of HybridFlow pass unchanged, and so do exceptions that end a program.

    Args:
        describe: makes the error to raise; the original becomes its cause.
        also: classes of exceptions that end a program and are turned nevertheless, such as a module's SystemExit.
        but: classes that pass.

    Raises:
        HybridFlowError: the error of `describe`.
    """
    passing: _Kinds = (HybridFlowError, *but)
    turned: _Kinds = (Exception, *also)
    try:
        yield
    except passing:
        raise
    except turned as error:
        raise describe(error) from error


class Caught:
    """Keeps the exception of a `with` block and continues after it. Exceptions that end a program pass.

    Args:
        also: classes of exceptions that end a program and are kept nevertheless, such as a module's SystemExit.
        but: classes that pass.

    Attributes:
        error: the exception; None if the block raised none.
    """

    error: BaseException | None = None

    def __init__(self, *, also: _Kinds = (), but: _Kinds = ()) -> None:
        self._kept: _Kinds = (Exception, *also)
        self._passing = but

    def __enter__(self) -> Caught:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        is_kept = isinstance(error, self._kept) and not isinstance(error, self._passing)
        self.error = error if is_kept else None
        return is_kept
