"""A call as futures see it: they wait for it and read its results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from hf_controller.executors.ray.actor_ref import in_one_line
from hf_controller.executors.ray.call_state import CallState
from hf_controller.executors.ray.handles import ValueHandle
from hf_controller.executors.ray.supervisor import Supervisor
from hf_controller.executors.ray.waiting import Waiter
from hf_controller.executors.ray.wire import unpack_answer
from hf_controller.failures import Failure, LostResultError, diagnosed
from hf_protocols import HybridFlowError, WorkerTimeoutError

if TYPE_CHECKING:
    from hf_controller.data.results import Outcome
    from hf_controller.data.transport import ObjectStore
    from hf_controller.groups.resource_pool import ResourcePool
    from hf_controller.trace import CallReport

__all__ = ["RayCall", "take_ready"]


class RayCall:
    """A call on the ranks of a group.

    Args:
        state: the call as the ranks got it.
        handles: where readers find what the collected ranks left, in order.
        collected: the ranks whose outcomes make the result.
        waiter: waits.
        supervisor: reads the answers.
        store: has the objects that the call returned.
    """

    def __init__(
        self,
        *,
        state: CallState,
        handles: Sequence[Any],
        collected: Sequence[int],
        waiter: Waiter,
        supervisor: Supervisor,
        store: ObjectStore,
    ) -> None:
        self.handles = list(handles)
        self.call_id = state.call_id
        self.pool: ResourcePool = state.pool
        self._state = state
        self._collected = tuple(collected)
        self._waiter = waiter
        self._supervisor = supervisor
        self._store = store
        self._rows: list[int] | None = None

    def without_results(self) -> RayCall:
        """Returns the same call without handles of its results, for a caller that only waits for its end."""
        return RayCall(
            state=self._state,
            handles=[],
            collected=self._collected,
            waiter=self._waiter,
            supervisor=self._supervisor,
            store=self._store,
        )

    def finish(self) -> bool:
        """Waits for every rank and records why the call failed. Returns True if the call is over.

        Nothing is recorded for a failure that was reported to the program, or for a group that was released. A call
        that was reported as late is not waited for again.
        """
        state = self._state
        if state.is_told or state.actor_group.was_released:
            return True
        if not self._await(0.0 if state.is_late else None):
            return False
        if state.failure is not None:
            state.failure_log.explain(self, state.failure)
        return True

    def find_failure(self) -> Failure | None:
        """Waits for every rank, or for the first that failed; returns the failure."""
        self._await(None)
        return self._state.failure

    def wait(self, timeout_s: float | None) -> list[int]:
        """Waits for every rank; returns the numbers of rows from the collected ranks.

        Raises:
            HybridFlowError: the first failure of the call, or of its group.
            WorkerTimeoutError: if a rank is not done in time, with each missing rank's last call and stack.
        """
        state = self._state
        if not self._await(timeout_s):
            state.is_late = True
            ranks = ", ".join(map(str, state.find_unread()))
            advice = "raise the timeout_s of result(), or look at what they are at"
            raise WorkerTimeoutError(
                f"{state.role}.{state.method} is not done after {timeout_s:g} s on rank(s) {ranks}: "
                f"{diagnosed(state.describe_unread) or advice}:\n{self._supervisor.describe_late(state)}"
            )
        if state.failure is not None:
            state.is_told = True
            state.failure_log.tell(self.call_id, state.failure)
            raise state.failure.to_error()
        if self._rows is None:  # each item of a listed result asks
            self._rows = [state.reports[rank].num_rows for rank in self._collected]
        return self._rows

    def outcomes(self, timeout_s: float | None, position: int | None = None) -> list[Outcome]:
        """Waits; returns the collected ranks' outcomes that are not batches, or only the one at `position`."""
        self.wait(timeout_s)
        state = self._state
        asked = slice(None) if position is None else slice(position, position + 1)
        handles = self.handles[asked]
        if not isinstance(handles[0], ValueHandle):
            return [state.outcomes[rank] for rank in self._collected[asked]]
        try:
            return self._store.get(handles, state.deadline.seconds if timeout_s is None else timeout_s)
        except LostResultError as error:
            raise self.explain_loss(error) or self._explain_object(error) from None

    def explain_loss(self, error: LostResultError) -> HybridFlowError | None:
        """Returns the end of the process that made a lost result; None if the process is not this call's, or lives."""
        if all(process.origin != error.maker for process in self._state.actor_group.processes):
            return None
        death = self._supervisor.explain(error.maker)
        if death is None:
            return None
        self._state.failure_log.tell(self.call_id, death)
        return death.to_error()

    def _explain_object(self, error: LostResultError) -> HybridFlowError:
        """Returns the error of an object that cannot be packed: this call's own failure, not the loss of another
        result.
        """
        state = self._state
        for rank, handle in zip(self._collected, self.handles, strict=True):
            try:
                ray.get(handle.contents, timeout=0)
            except RayError as lost:
                cause = getattr(lost, "cause", None) or lost
                failure = state.describe(LostResultError(in_one_line(lost)), rank)
                failure = Failure(
                    **{**failure.__dict__, "pickled": b"", "cause_type": type(cause).__name__, "message": str(cause)}
                )
                state.failure_log.tell(self.call_id, failure)
                return failure.to_error()
        return error

    def _await(self, timeout_s: float | None) -> bool:
        self._waiter.check_open()
        state = self._state
        begun_s = time.monotonic()
        if not state.is_over and not state.reports:
            packed = self._waiter.get_all(list(state.answers.values()), timeout_s)
            if packed:
                self._supervisor.note_answers(state, packed)
        left_s = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - begun_s))
        return self._supervisor.wait(state, left_s)


def take_ready(handles: list[Any]) -> dict[Any, CallReport | None]:
    """Returns the available reports by their handles; None for a report that is lost with its rank or its inputs."""
    if not handles or not ray.is_initialized():  # Ray would start a cluster to look
        return {}
    ready = ray.wait(handles, num_returns=len(handles), timeout=0)[0]
    reports: dict[Any, CallReport | None] = {}
    for handle in ready:
        try:
            reports[handle] = unpack_answer(ray.get(handle))[1]
        except RayError:
            reports[handle] = None
    return reports
