"""Watches the calls that are in flight: a group of which one rank fails ends as a whole, with its first failure.

Nothing is concluded from the text of an error, or from where a rank stands. A rank reports that its method raised, the
system that a process ended, and the clock that a call takes longer than its deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from hf_controller.executors.ray.actor_group import ActorGroup
from hf_controller.executors.ray.actor_ref import (
    DEATH_IS_KNOWN_S,
    ActorRef,
    describe_death,
    describe_processes,
    find_dead,
    find_maker,
    in_one_line,
)
from hf_controller.executors.ray.call_state import CallState
from hf_controller.executors.ray.cluster import Cluster
from hf_controller.executors.ray.waiting import Probe, Waiter
from hf_controller.failures import Failure, LostResultError, describe_end, diagnosed, went_alike
from hf_protocols import WorkerError, WorkerTimeoutError

if TYPE_CHECKING:
    from hf_controller.groups.resource_pool import ResourcePool

__all__ = ["Supervisor"]

_ANSWER_TIMEOUT_S = 5.0
_GRACE_S = 5.0
"""Longest delay after the first report with which other ranks report a failure that all agreed on."""
_SETTLING_S = 1.0
"""Longest delay with which the end of a process becomes known, counted from its effect on others."""
_POLL_S = 0.05
_GAP_S = 5.0
"""A longer time between two looks means that this process was stopped, or did something else."""
_MIN_LOOK = 64


class Supervisor:
    """Reads the answers of all calls, counts their time, and ends the groups that failed.

    Args:
        waiter: waits for answers.
        probe: asks processes for their current activity.
        list_actor_groups: returns the sets of processes that currently exist.
        cluster: the cluster, without which nothing goes on.
    """

    def __init__(
        self,
        *,
        waiter: Waiter,
        probe: Probe,
        list_actor_groups: Callable[[], Sequence[ActorGroup]],
        cluster: Cluster,
    ) -> None:
        self._waiter = waiter
        self._probe = probe
        self._list_actor_groups = list_actor_groups
        self._cluster = cluster
        self._calls: dict[int, CallState] = {}
        self._makers: dict[str, Failure] = {}
        self._made: dict[Any, int] = {}
        self._looked_s = time.monotonic()
        self._next_look = _MIN_LOOK

    def watch(self, call: CallState, contents: Iterable[Any]) -> None:
        """Watches a call that was just made, which leaves `contents`."""
        self._calls[call.call_id] = call
        call.left = [each.binary() for each in (*call.answers.values(), *contents)]
        self._made |= dict.fromkeys(call.left, call.call_id)
        if len(self._calls) >= self._next_look:  # nobody waits for them
            self.look()
            self._next_look = max(_MIN_LOOK, 2 * len(self._calls))

    def find_makers(self, objects: Iterable[bytes]) -> frozenset[int]:
        """The numbers of calls in flight that leave some of these objects."""
        return frozenset(self._made[each] for each in objects if each in self._made)

    def note_answers(self, call: CallState, packed: Sequence[object]) -> None:
        """All of a call's answers are there."""
        for rank, answer in zip(list(call.answers), packed, strict=True):
            call.note_answer(rank, answer)
        self._judge(call)
        self._forget_finished()

    def wait(self, call: CallState, timeout_s: float | None) -> bool:
        """Waits until a call is over, or failed; false if it is neither after `timeout_s`.

        Raises:
            PoolError: if the cluster itself ended.
        """
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not call.is_over:
            left_s = None if ends_s is None else ends_s - time.monotonic()
            self._waiter.wait_slice(list(call.find_unread().values()), left_s)
            self.look()
            self._judge(call)
            if left_s is not None and left_s <= 0:
                return call.is_over
        return True

    def look(self) -> None:
        """Reads the answers that are there, and ends the groups that failed or hang.

        Raises:
            PoolError: if the cluster itself ended.
        """
        now_s = time.monotonic()
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        self._cluster.check()
        self._read_answers(self._calls.values())
        for actor_group in self._list_actor_groups():
            if actor_group.failure is None:
                self._find_death(actor_group)
        for call in list(self._calls.values()):
            self._judge(call, passed_s)
        self._forget_finished()
        first: dict[ResourcePool, CallState] = {}
        for call in self._calls.values():  # in the order in which they were made
            first.setdefault(call.pool, call)
        for call in first.values():
            self._count_time(call, passed_s)

    def look_for_deaths(self, actor_groups: Sequence[ActorGroup]) -> None:
        """Looks once the processes of joined groups have answered: one that was killed a moment ago never does.

        Raises:
            PoolError: if the cluster itself ended.
        """
        joined = [each for each in actor_groups if each.failure is None and len(each.list_joined()) > 1]
        asked = {process: actor_group for actor_group in joined for process in actor_group.processes}
        dead = find_dead(list(asked), self._probe, _ANSWER_TIMEOUT_S)
        self.look()
        if dead is not None and asked[dead[0]].failure is None:
            self._end_of_process(asked[dead[0]], *dead)

    def explain(self, maker: str) -> Failure | None:
        """Returns the failure of the group whose process made a lost result; None if it was released or is unknown."""
        self._read_answers(self._calls.values())
        for actor_group in self._list_actor_groups():
            if actor_group.failure is None and any(process.origin == maker for process in actor_group.processes):
                self._await_death(actor_group)
        return self._makers.get(maker)

    def describe_late(self, call: CallState) -> str:
        """Describes the activity of the ranks that have not answered, and of those that compute meanwhile."""
        return diagnosed(lambda: self._describe_late(call, list(call.find_unread())))

    def _read_answers(self, calls: Iterable[CallState]) -> None:
        unread = {handle: (call, rank) for call in calls for rank, handle in call.find_unread().items()}
        if unread:
            for handle in ray.wait(list(unread), num_returns=len(unread), timeout=0)[0]:
                call, rank = unread[handle]
                call.read(rank)

    def _forget_finished(self) -> None:
        for call_id, call in list(self._calls.items()):
            if not call.find_unread() or call.actor_group.failure is not None:
                del self._calls[call_id]
                for each in call.left:
                    self._made.pop(each, None)

    def _find_death(self, actor_group: ActorGroup) -> bool:
        """Ends a group of which a process is gone. Returns True if one is."""
        for process in actor_group.processes:
            end = process.find_end()
            if end is not None and not actor_group.was_released:
                self._end_of_process(actor_group, process, None)
                return True
        return False

    def _await_death(self, actor_group: ActorGroup) -> None:
        """Waits for the end of an actor group whose results are lost: its process is gone, or will be soon."""
        ends_s = time.monotonic() + _SETTLING_S
        while actor_group.failure is None and not self._find_death(actor_group):
            if time.monotonic() > ends_s:
                self._find_remote_death([actor_group])
                break
            time.sleep(_POLL_S)

    def _find_remote_death(self, members: Sequence[ActorGroup]) -> bool:
        """As `_find_death`, for processes of joined groups on other machines: only Ray reports their end."""
        remote = {process: each for each in members for process in each.processes if not process.is_watched}
        dead = find_dead(list(remote), self._probe, DEATH_IS_KNOWN_S)
        if dead is not None:
            self._end_of_process(remote[dead[0]], *dead)
        return dead is not None

    def _end_of_process(self, actor_group: ActorGroup, process: ActorRef, error: RayError | None) -> None:
        self._await_last_answers(actor_group, process.rank)
        ran = next(
            (c for c in self._calls.values() if c.actor_group is actor_group and _was_ended(c, process.rank)), None
        )
        last = process.last_call.split(" ")[-1]
        role, _, method = f"{ran.role}.{ran.method}".partition(".") if ran else last.partition(".")
        found = describe_death(
            process,
            role=role if method else actor_group.name,
            method=method or "__init__",
            rank=process.rank,
            error=error,
            probe=self._probe,
        )
        self._end(actor_group, found)

    def _await_last_answers(self, actor_group: ActorGroup, rank: int) -> None:
        """A process's end is seen at once; that it had answered its earlier calls is known a moment later."""
        calls = [
            call for call in self._calls.values() if call.actor_group is actor_group and rank in call.find_unread()
        ]
        if calls:
            handles = [call.find_unread()[rank] for call in calls]
            ray.wait(handles, num_returns=len(handles), timeout=_SETTLING_S)
            self._read_answers(calls)

    def _find_running(self, actor_group: ActorGroup, rank: int) -> CallState | None:
        """The first call that a rank was given and has not answered, or that has just failed there."""
        given = (each for each in self._calls.values() if each.actor_group is actor_group)
        return next((each for each in given if rank in each.find_unread() or rank in each.failures), None)

    def _judge(self, call: CallState, passed_s: float = 0.0) -> None:
        """Decides if a call failed, and its group with it."""
        if call.failure is None and call.actor_group.failure is not None and (call.has_failed or call.find_unread()):
            call.failure = call.actor_group.failure
        if call.failure is not None or not call.has_failed:
            return
        for rank, error in call.lost.items():
            if not isinstance(error, RayTaskError):
                if call.actor_group.was_released:
                    call.failure = _describe_release(call, rank)
                    return
                self._end_of_process(call.actor_group, call.actor_group.processes[rank], error)
                return
        unread = {rank for rank, each in call.failures.items() if each.lost_from in self._makers}
        failures = self._name_makers(call)
        failures |= {rank: self._lost_input(call, rank) for rank in call.lost}
        passed_on = call.passed_on | call.lost.keys() | unread
        is_partial = bool(call.find_unread())
        if not call.can_hang or (not is_partial and went_alike(call.answers, failures, passed_on)):
            call.failure = call.choose(failures)
            return
        call.grace_s += min(passed_s, 1.0)
        if is_partial and call.grace_s < _GRACE_S and went_alike(failures, failures, passed_on):
            return  # the others are about to say the same
        self._settle(call)

    def _name_makers(self, call: CallState) -> dict[int, Failure]:
        """The failures of a call's ranks; of a lost input the failure of the process that made it."""
        return {rank: self._makers.get(each.lost_from or "", each) for rank, each in call.failures.items()}

    def _lost_input(self, call: CallState, rank: int) -> Failure:
        """Returns the reason why Ray could not bring a rank its inputs."""
        error = call.lost[rank]
        maker = find_maker(error)
        made_by = self._makers.get(maker)
        if made_by is not None:
            return made_by
        cause = getattr(error, "cause", None) or error
        if not isinstance(cause, RayError):  # what the method returned cannot travel
            found = call.describe(WorkerError(str(cause)), rank)
            kind, text = type(cause).__name__, str(cause)
            return replace(found, pickled=b"", cause_type=kind, message=text, has_returned=True, remote_traceback="")
        return call.describe(
            LostResultError(
                f"an earlier call's result is lost with its process: {in_one_line(cause)}; a pool that was released "
                "takes the results of its unfinished calls along"
            ),
            rank,
        )

    def _settle(self, call: CallState) -> None:
        """Ends the group of a call for its first failure; a death may become known a moment after it affects others."""
        ends_s = time.monotonic() + _SETTLING_S
        members = call.actor_group.list_joined()
        while True:
            self._read_answers([each for each in self._calls.values() if each.actor_group in members])
            if any(self._find_death(actor_group) for actor_group in members):
                return
            for each in list(self._calls.values()):
                dead = [rank for rank, error in each.lost.items() if not isinstance(error, RayTaskError)]
                if each.actor_group in members and dead:
                    self._end_of_process(each.actor_group, each.actor_group.processes[dead[0]], each.lost[dead[0]])
                    return
            if time.monotonic() > ends_s:
                break
            time.sleep(_POLL_S)
        if self._find_remote_death(members):
            return
        raised = [each for each in self._calls.values() if each.actor_group in members and each.failures]
        failed = min([call, *raised], key=lambda each: each.first_failure_s)
        self._end(
            failed.actor_group, failed.choose(failed.failures or {0: self._lost_input(call, next(iter(call.lost)))})
        )

    def _count_time(self, call: CallState, passed_s: float) -> None:
        """Counts the time, as seen by this process, of a pool's first call, which waits only for inputs and ranks."""
        if call.actor_group.failure is not None or call.inputs & self._calls.keys() or not call.actor_group.is_ready():
            return
        call.elapsed_s = 0.0 if passed_s > _GAP_S else call.elapsed_s + passed_s
        if call.elapsed_s > call.deadline.seconds:
            self._end_of_time(call)

    def _end_of_time(self, call: CallState) -> None:
        """Ends a call that hangs: names the processes that do not move, of its group or of groups joined with it."""
        members = [process for actor_group in call.actor_group.list_joined() for process in actor_group.processes]
        late = sorted(call.find_unread())
        seconds, key = call.deadline
        head = f"{call.role}.{call.method} is not done after {seconds:g} s on rank(s) {', '.join(map(str, late))}"
        silent: list[ActorRef] = []
        stopped = self._cluster.resume_stopped()

        def describe() -> str:
            described = describe_processes(members, self._probe, _ANSWER_TIMEOUT_S)
            silent.extend(process for process, (answers, _) in zip(members, described, strict=True) if not answers)
            who = f"{', '.join(each.label for each in silent)} did not move. " if silent else ""
            who += "".join(f"The {name} of the cluster was stopped, as by SIGSTOP. " for name in stopped)
            unread = call.describe_unread()
            return "\n".join(
                [
                    f"{head}: {who}{unread or f'Raise {key} if it was only slow, or look at what the ranks are at'}:",
                    *(f"{process.label}: {text}" for process, (_, text) in zip(members, described, strict=True)),
                ]
            )

        text = diagnosed(describe)
        if not text.startswith(head):
            text = f"{head}. Raise {key} if it was only slow. {text}"
        rank = next((each.rank for each in silent if each in call.actor_group.processes), late[0])
        found = Failure.of(WorkerTimeoutError(text), role=call.role, method=call.method, rank=rank, origin=call.origin)
        self._end(call.actor_group, replace(found, remote_traceback="", exception=None))

    def _end(self, failed: ActorGroup, failure: Failure) -> None:
        """Ends a group, those in its processes, and those that it is joined with."""
        members = failed.list_joined()
        roles = [role for actor_group in members for role in actor_group.roles]
        others = diagnosed(lambda: self._describe_others(members, failure))
        note = describe_end(roles, others, [actor_group.pool.name for actor_group in members])
        failure = replace(failure, note=note)
        for actor_group in members:
            actor_group.fail(failure)
            self._makers |= {process.origin: failure for process in actor_group.processes}
        for call in self._calls.values():
            if call.actor_group not in members or call.failure is not None:
                continue
            felt_it = bool(call.failures) and call.actor_group is not failed  # of a partner, which ended
            if call.find_unread() or call.lost or call.origin == failure.origin or felt_it:
                call.failure = failure
            elif call.failures:  # it was over before
                call.failure = call.choose(self._name_makers(call))

    def _describe_others(self, members: Sequence[ActorGroup], failure: Failure) -> str:
        """Describes the activity of the other ranks, as far as it is known here."""
        said = []
        for actor_group in members:
            for process in actor_group.processes:
                if process.rank == failure.rank and failure.role in actor_group.roles:
                    continue
                ran = self._find_running(actor_group, process.rank)
                doing = f"in {ran.role}.{ran.method}" if ran else "idle"
                said.append(f"{process.label} was {'gone' if process.is_gone else doing}")
        return f"; {', '.join(said)}" if said else ""

    def _describe_late(self, call: CallState, ranks: Sequence[int]) -> str:
        everyone = [process for actor_group in self._list_actor_groups() for process in actor_group.processes]
        described = dict(zip(everyone, describe_processes(everyone, self._probe, _ANSWER_TIMEOUT_S), strict=True))
        late = {call.actor_group.processes[rank]: rank for rank in ranks}
        lines = [f"rank {rank}: {described[process][1]}" for process, rank in late.items() if process in described]
        # What a late rank waits for is what others are at.
        return "\n".join(
            [
                *lines,
                *(
                    f"{process.label}: {text}"
                    for process, (_, text) in described.items()
                    if process not in late and ": computing for " in text.partition("\n")[0]
                ),
            ]
        )


def _was_ended(call: CallState, rank: int) -> bool:
    """Returns True if a rank has not answered a call, or ended with it; calls run in order, so the first one ran."""
    error = call.lost.get(rank)
    return rank in call.find_unread() or (error is not None and not isinstance(error, RayTaskError))


def _describe_release(call: CallState, rank: int) -> Failure:
    process = call.actor_group.processes[rank]
    return call.describe(
        WorkerError(
            f"{call.role}.{call.method} on rank {rank} failed: process {process.label} is gone: its pool "
            f"{process.pool!r} was released. Ask for results before"
        ),
        rank,
    )
