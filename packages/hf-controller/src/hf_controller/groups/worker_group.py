"""A worker group: all ranks of one role, called as one object."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from hf_controller.groups.resource_pool import ResourcePool
from hf_controller.groups.worker import WorkerSpec
from hf_protocols import MethodSpec, ProtocolError, Topology, registered_methods
from hf_protocols.validation import show

__all__ = ["GroupExecutor", "WorkerGroup"]


class GroupExecutor(Protocol):
    """Requests of a group to its executor."""

    def submit(self, group: WorkerGroup, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call; the answer is a future."""
        ...

    def connect(self, first: WorkerGroup, second: WorkerGroup, name: str) -> None:
        """Join two groups in one process group."""
        ...


class WorkerGroup:
    """All ranks of one role. Its registered methods are called like a single object's, and answer at once.

    `group.method(*args, **kwargs)`: TensorDicts and BatchFutures among the arguments are distributed to the ranks by
    the method's protocol; everything else reaches every rank as it is. Arguments that the method does not take are a
    ProtocolError at once. The answer is a
    `BatchFuture`, MetricsFuture, ListFuture or ObjectFuture, as the method is registered.

    Calls of one group, and of groups on one pool, run in the order in which they were made.
    """

    def __init__(
        self,
        role: str,
        spec: WorkerSpec,
        pool: ResourcePool,
        executor: GroupExecutor,
    ) -> None:
        self.role = role
        self.spec = spec
        self.pool = pool
        self.methods: dict[str, MethodSpec] = registered_methods(spec.worker)
        self.executor = executor
        self.called_ranks: dict[str, tuple[int, ...]] = {}
        self._signatures: dict[str, inspect.Signature] = {}
        taken = sorted(name for name in self.methods if name in type(self).__dict__ or name in self.__dict__)
        if taken:
            raise ProtocolError(
                f"{spec.worker.__name__} registers {', '.join(taken)}, names that a WorkerGroup has itself: rename"
            )

    @property
    def topology(self) -> Topology:
        """The role's layout."""
        return self.spec.topology

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.spec.topology.world_size

    def __getattr__(self, name: str) -> Callable[..., Any]:
        methods = self.__dict__.get("methods", {})
        if name not in methods:
            known = ", ".join(sorted(methods)) or "none"
            raise AttributeError(
                f"group {self.__dict__.get('role')!r} has no method {show(name)}; it registers {known}"
            )
        return partial(self._call, name)

    def _call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        if method not in self._signatures:
            self._signatures[method] = inspect.signature(getattr(self.spec.worker, method))
        try:
            self._signatures[method].bind(None, *args, **kwargs)
        except TypeError as error:
            names = [name for name in self._signatures[method].parameters if name != "self"]
            raise ProtocolError(f"{self.role}.{method}({', '.join(names)}): {error}") from None
        return self.executor.submit(self, method, args, kwargs)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.methods})

    def __repr__(self) -> str:
        return f"WorkerGroup({self.role!r}, {self.spec.worker.__name__}, {self.world_size} ranks on {self.pool.name!r})"
