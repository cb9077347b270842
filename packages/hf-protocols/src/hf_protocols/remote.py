"""`@register`: the declaration of a method that is called across ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from inspect import Parameter, getattr_static, isasyncgenfunction, iscoroutinefunction, isgeneratorfunction, signature
from typing import Any, Final, Literal, TypeVar, get_args

from hf_protocols.dataflow import CallKind
from hf_protocols.errors import ProtocolError
from hf_protocols.transfer import TransferProtocol
from hf_protocols.validation import Checks, show

__all__ = [
    "FROM_ARGUMENT",
    "FromArgument",
    "MethodSpec",
    "Returns",
    "Rows",
    "method_spec",
    "register",
    "registered_methods",
]

_check = Checks(ProtocolError)

Rows = Literal["same", "times", "unknown"]
Returns = Literal["batch", "metrics", "object"]

Method = TypeVar("Method", bound=Callable[..., Any])

_ATTRIBUTE = "__hybridflow_method__"


class FromArgument(Enum):
    """Type of `FROM_ARGUMENT`."""

    FROM_ARGUMENT = "from argument"

    def __repr__(self) -> str:
        return self.name


FROM_ARGUMENT: Final = FromArgument.FROM_ARGUMENT
"""Value of `writes` in `@register` for a method whose result has the columns that an argument of each call declares."""


@dataclass(frozen=True, kw_only=True)
class MethodSpec:
    """The registration that `register` attaches to a method; its arguments explain the fields."""

    protocol: TransferProtocol
    rows: Rows
    returns: Returns
    reads: tuple[str, ...] | None
    writes: tuple[str, ...] | FromArgument | None
    kind: CallKind = "function"


def register(
    *,
    protocol: TransferProtocol,
    rows: Rows = "same",
    returns: Returns = "batch",
    reads: Sequence[str] | None = None,
    writes: Sequence[str] | FromArgument | None = None,
    kind: CallKind = "function",
) -> Callable[[Method], Method]:
    """Marks a worker's method as callable through its group.

    Every batch argument is distributed by `protocol`; other arguments reach every rank as they are.

    An argument may declare columns itself, for example a user's loss or estimator. If it has an
    attribute `reads`, a tuple of names, a call with it reads these columns in addition to the method's. With
    `writes=FROM_ARGUMENT` exactly one argument has an attribute `writes`, and the call returns those columns.

    Args:
        protocol: how rows reach the ranks and results come back.
        rows: how the result's rows follow from the input's. `"same"`: one for one; `"times"`: each input row
            becomes k consecutive rows (n samples per prompt); `"unknown"`: results follow in collected order.
        returns: `"batch"`, a TensorDict; `"metrics"`, a dict of name to (sum, count), merged over the collected
            ranks (`merge_metrics`) and divided once; `"object"`, any small picklable value (of several collected
            ranks, their list).
        reads: columns that travel to the method; None for all. A name that ends in `?` travels if it is there.
        writes: columns that the method returns; None if unknown; `FROM_ARGUMENT` if an argument declares them.
        kind: the work behind it, for planners: `"generation"`, `"inference"` or `"training"` of a model,
            or a `"function"` without one.

    Raises:
        ProtocolError: for a value of another kind, for a generator or an `async def`, or `writes=FROM_ARGUMENT` on a
            method without a batch as result or without arguments.
    """
    if not isinstance(protocol, TransferProtocol):
        raise ProtocolError(f"protocol={show(protocol)} is not a TransferProtocol. Use one of hf_protocols or your own")
    _check.one_of("rows", rows, get_args(Rows))
    _check.one_of("returns", returns, get_args(Returns))
    _check.one_of("kind", kind, get_args(CallKind))
    if writes is FROM_ARGUMENT and returns != "batch":
        raise ProtocolError(
            f"writes=FROM_ARGUMENT: returns={show(returns)} has no columns. Leave writes out, or give returns='batch'"
        )
    spec = MethodSpec(
        protocol=protocol,
        rows=rows,
        returns=returns,
        reads=None if reads is None else _check.columns("reads", reads, may_lack=True),
        writes=_check_writes(writes),
        kind=kind,
    )

    def mark(method: Method) -> Method:
        given: Any = method
        # A staticmethod would keep the mark to itself; the class shows the function inside.
        if not callable(given) or isinstance(given, type | staticmethod):
            raise ProtocolError(f"@register marks a method, got {show(given)}. Put it right above a `def`")
        name = getattr(method, "__name__", show(method))
        if isgeneratorfunction(method):
            raise ProtocolError(f"@register marks {name}, which yields its results. Return all of them at once")
        if iscoroutinefunction(method) or isasyncgenfunction(method):
            raise ProtocolError(f"@register marks {name}, which is async. Use `def`, with asyncio.run(...) inside")
        if spec.writes is FROM_ARGUMENT and not _takes_arguments(method):
            raise ProtocolError(
                f"writes=FROM_ARGUMENT: {name} takes no argument that could declare columns. Add a parameter, or name "
                "the columns in writes"
            )
        setattr(method, _ATTRIBUTE, spec)
        return method

    return mark


def _check_writes(writes: object) -> tuple[str, ...] | FromArgument | None:
    if writes is None or isinstance(writes, FromArgument):
        return writes
    return _check.columns("writes", writes, may_lack=False)


def _takes_arguments(method: Callable[..., Any]) -> bool:
    """True for a method with a parameter after the worker, and for one whose parameters Python does not know."""
    try:
        parameters = list(signature(method).parameters.values())
    except ValueError:
        return True
    return len(parameters) > 1 or any(each.kind is Parameter.VAR_POSITIONAL for each in parameters)


def method_spec(method: Callable[..., Any]) -> MethodSpec | None:
    """Returns the registration of `method`, or None."""
    spec = getattr(method, _ATTRIBUTE, None)
    return spec if isinstance(spec, MethodSpec) else None


def registered_methods(worker: type) -> dict[str, MethodSpec]:
    """The registered methods of a class by name, inherited ones included.

    Raises:
        ProtocolError: for a registered function that is a staticmethod or a classmethod.
    """
    found = {name: method_spec(getattr(worker, name)) for name in dir(worker)}
    for name in found:
        kind = type(getattr_static(worker, name))
        if found[name] is not None and kind in (staticmethod, classmethod):
            raise ProtocolError(
                f"{worker.__name__}.{name} is a {kind.__name__}. Register a method, `def {name}(self, ...)`"
            )
    return {name: spec for name, spec in found.items() if spec is not None}
