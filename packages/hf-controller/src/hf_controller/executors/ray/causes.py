"""Why a call failed: what its rank said, or the death of a process that explains it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from hf_controller.executors.ray.host_process import (
    HostProcess,
    describe_death,
    describe_processes,
    find_maker,
    in_one_line,
)
from hf_controller.executors.ray.inquirer import Inquirer
from hf_controller.failures import Failure, LostResultError
from hf_protocols import WorkerTimeoutError

if TYPE_CHECKING:
    from hf_controller.trace import CallReport

__all__ = ["Causes", "SentCall", "choose_telling", "find_lost", "find_suspects"]

_ANSWER_TIMEOUT_S = 5.0
# What a rank raises whose peer left a collective went through torch's collectives, or names the library below them.
_OF_A_COLLECTIVE = re.compile(
    r"(distributed_c10d|_functional_collectives)\.py\"|torch\.distributed\.Dist|gloo/[\w/]+\.(cc|h)\b"
    r"|ProcessGroup(Gloo|NCCL)|NCCL error"
)

_CLOSED = re.compile(r"timeout caused pair closure")
_TIMED_OUT = re.compile(r"time[d ]*out", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class SentCall:
    """A call as the ranks of a group got it.

    Attributes:
        call_id: its number.
        role: the role.
        method: its method.
        processes: the process of every called rank.
        answers: reference of every called rank's answer.
    """

    call_id: int
    role: str
    method: str
    processes: Mapping[int, HostProcess]
    answers: Mapping[int, Any]

    @property
    def origin(self) -> str:
        """What it is called as a :class:`Failure`'s origin."""
        return f"call {self.call_id}"

    def find_unanswered(self) -> list[HostProcess]:
        """The processes that have not answered: one that has may have died later, of something else."""
        answers = list(self.answers.values())
        ready, lost = ray.wait(answers, num_returns=len(answers), timeout=0)[0], find_lost(self.answers)
        return [each for rank, each in self.processes.items() if rank in lost or self.answers[rank] not in ready]


def choose_telling(reports: Iterable[CallReport]) -> tuple[Failure, bool] | None:
    """Of the failures that ranks reported together, the one that tells most, and whether it was passed on to its rank.

    Who failed in a collective may have been left alone there by who failed of something else; of others the first.
    """
    failed = [(report.failure, report) for report in reports if report.failure is not None]
    if not failed:
        return None
    failure, report = min(failed, key=lambda each: (_is_of_collective(each[0]), each[1].span.end_s))
    return failure, report.upstream


def _is_of_collective(failure: Failure) -> bool:
    """Whether it came out of one, as far as its traceback tells."""
    return _OF_A_COLLECTIVE.search(failure.remote_traceback) is not None


def find_suspects(
    seen: Failure | RayError,
    *,
    unanswered: Callable[[], Sequence[HostProcess]],
    connected: Sequence[HostProcess],
    everyone: Sequence[HostProcess],
) -> list[HostProcess]:
    """The processes whose death explains what is seen of a call: the first of them that is gone is the cause.

    An input that cannot be read is explained by the process that made it, if that is known; an answer that is lost by
    the ranks that have not answered; the error of a collective by these and by those of connected groups; any other
    exception by itself.
    """
    if isinstance(seen, Failure):
        if seen.lost_from is not None:
            return _find_process(seen.lost_from, everyone)
        return [*unanswered(), *connected] if _is_of_collective(seen) else []
    # Ray runs no method whose input is lost, and says so in place of its answer.
    maker = find_maker(seen) if isinstance(seen, RayTaskError) else ""
    return _find_process(maker, everyone) if maker else list(unanswered())


def _find_process(origin: str, everyone: Sequence[HostProcess]) -> list[HostProcess]:
    return [process for process in everyone if process.origin == origin]


class Causes:
    """Finds why a call failed, and what those are at who are late.

    Args:
        sent: the call.
        connected: the processes of groups that its group was connected with when it was made.
        everyone: every process of the executor.
        inquirer: asks processes how they are.
    """

    def __init__(
        self,
        sent: SentCall,
        *,
        connected: Sequence[HostProcess],
        everyone: Callable[[], Sequence[HostProcess]],
        inquirer: Inquirer,
    ) -> None:
        self._sent = sent
        self._connected = connected
        self._everyone = everyone
        self._inquirer = inquirer

    def of_failure(self, failure: Failure) -> Failure:
        """What a rank's own failure comes from."""
        death = self._find_death(self._list_suspects(failure), failure.rank)
        if death is not None:
            said = f"of rank {failure.rank}, whose process lives:\n{failure.remote_traceback}"
            return replace(death, remote_traceback=said)
        if _is_our_timeout(failure):
            return self._say_who_computes(failure)
        is_missing = _is_of_collective(failure) and _TIMED_OUT.search(failure.message)
        return self._say_who_is_missing(failure) if is_missing else failure

    def of_lost_answer(self, rank: int, error: RayError) -> Failure:
        """Why the answer of ``rank`` cannot be had."""
        return self._find_death(self._list_suspects(error), rank) or self.of_lost_object(rank, error)

    def of_lost_object(self, rank: int, error: RayError) -> Failure:
        """What a call says whose process lives, and whose answer, inputs or result cannot be had."""
        if isinstance(error, RayActorError | RayTaskError):
            return self._describe_death(rank, error, self._sent.processes[rank])
        return Failure(
            role=self._sent.role,
            method=self._sent.method,
            rank=rank,
            cause_type=type(error).__name__,
            message=f"an earlier call's result is lost: {in_one_line(error)}",
            remote_traceback="",
            origin=self._sent.origin,
        )

    def of_loss(self, error: LostResultError) -> Failure | None:
        """The end of that process of this call that made what cannot be read; None where it is another's, or lives."""
        death = self._find_death(_find_process(error.maker, list(self._sent.processes.values())), rank=0)
        return death and replace(death, message=f"an earlier call's result is lost: {death.message}")

    def of_lateness(self, error: WorkerTimeoutError, rank: int) -> Failure:
        """A failure of this call that the controller itself found: ``rank`` is late."""
        found = Failure.of(error, role=self._sent.role, method=self._sent.method, rank=rank, origin=self._sent.origin)
        return replace(found, remote_traceback="", exception=None)

    def describe_late(self, ranks: Sequence[int]) -> list[str]:
        """What each of ``ranks`` is at, and who computes while they wait."""
        described = self._describe_everyone()
        late = {self._sent.processes[rank]: rank for rank in ranks}
        lines = [f"rank {late[process]}: {text}" for process, text in described.items() if process in late]
        # What a late rank waits for is what others are at.
        return lines + _list_computing({each: text for each, text in described.items() if each not in late})

    def _describe_everyone(self) -> dict[HostProcess, str]:
        everyone = dict(enumerate(self._everyone()))
        described = describe_processes(everyone, self._inquirer, _ANSWER_TIMEOUT_S)
        return {everyone[index]: text for index, text in described.items()}

    def _say_who_computes(self, failure: Failure) -> Failure:
        """A rank that waited in vain does not know for whom."""
        computing = _list_computing(self._describe_everyone())
        if not computing:
            return failure
        told = self.of_lateness(WorkerTimeoutError("\n".join([failure.message, *computing])), failure.rank)
        return replace(told, remote_traceback=failure.remote_traceback)

    def _say_who_is_missing(self, failure: Failure) -> Failure:
        """A rank whose collective timed out does not know who did not come."""
        others = [rank for rank in self._sent.processes if rank != failure.rank]
        if not others:
            return failure
        head = (
            "who did not come in time? Raise collective_timeout_s (of a run: cluster.call_timeout_s), or look at what "
            "the other ranks are at:"
        )
        if _CLOSED.search(failure.message):
            head = (
                "a collective of this group timed out, in this call or in an earlier one, and closed its connections: "
                f"rebuild(executor, [pool]) builds the groups of its pool again. If it was in this call, {head}"
            )
        return replace(failure, message="\n".join([f"{failure.message}: {head}", *self.describe_late(others)]))

    def _list_suspects(self, seen: Failure | RayError) -> list[HostProcess]:
        return find_suspects(
            seen, unanswered=self._sent.find_unanswered, connected=self._connected, everyone=self._everyone()
        )

    def _find_death(self, suspects: Sequence[HostProcess], rank: int) -> Failure | None:
        """The death that explains what is seen of ``rank``, with all others that are gone."""
        if not suspects:
            return None
        processes = list(dict.fromkeys([*suspects, *self._everyone()]))
        answers = self._inquirer.ask([process.actor for process in processes], "ping", _ANSWER_TIMEOUT_S)
        dead = {
            process: answer
            for process, answer in zip(processes, answers, strict=True)
            if isinstance(answer, RayError) and not isinstance(answer, GetTimeoutError)
        }
        first = next((process for process in suspects if process in dead), None)
        if first is None:
            return None
        others = [process for process in dead if process is not first and not process.was_ended]
        for process in others:
            process.note_death(dead[process])
        ranks = {process: rank for rank, process in self._sent.processes.items()}
        return self._describe_death(ranks.get(first, rank), dead[first], first, others)

    def _describe_death(
        self, rank: int, error: RayError, process: HostProcess, others: Sequence[HostProcess] = ()
    ) -> Failure:
        sent = self._sent
        death = describe_death(error, process, role=sent.role, method=sent.method, rank=rank, others=others)
        return death if death.origin else replace(death, origin=sent.origin)


def find_lost(handles: Mapping[int, Any]) -> dict[int, RayError]:
    """What became of those handles behind which there is no value; those that are not ready are left out."""
    ready = set(ray.wait(list(handles.values()), num_returns=len(handles), timeout=0)[0])
    lost = {}
    for rank, handle in handles.items():
        if handle in ready:
            try:
                ray.get(handle)
            except RayError as error:
                lost[rank] = error
    return lost


def _is_our_timeout(failure: Failure) -> bool:
    return bool(failure.pickled) and failure.cause_type == WorkerTimeoutError.__name__


def _list_computing(described: Mapping[HostProcess, str]) -> list[str]:
    computing = {process: text for process, text in described.items() if ": computing for " in text.partition("\n")[0]}
    return [f"{process.label}: {text}" for process, text in computing.items()]
