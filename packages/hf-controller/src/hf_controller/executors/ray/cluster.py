"""A local Ray cluster of one's own, or an explicit foreign one, whose processes are looked at by their ports."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.job_config import JobConfig
from ray.util.debug import log_once

from hf_controller.executors.ray.process_end import ProcessEnd, is_stopped
from hf_controller.executors.ray.ray_internals import start_workers_without_uv, starting_by
from hf_controller.executors.ray.spilling import SpillCheck
from hf_controller.executors.ray.terminal import quiet_ray, without_quiet
from hf_controller.executors.ray.watchdog import Watchdog
from hf_controller.failures import Deadline, LostClusterError
from hf_controller.local_start import check_local_start, find_temp_dir
from hf_controller.signals import shielded
from hf_protocols import HybridFlowError, PoolError, WorkerTimeoutError, read_machine_limits
from hf_protocols.foreign_code import Caught, raised_as
from hf_protocols.process_lock import ProcessLock
from hf_protocols.validation import show

__all__ = ["Cluster", "Reachability"]

_ANSWER_TIMEOUT_S = 10.0
_END_TIMEOUT_S = 10.0
_MOST_REASON = 400
_CONNECTION_LIMITS = ("grpc_keepalive_timeout_ms", "grpc_client_keepalive_timeout_ms")
_PATIENCE_MS = 24 * 60 * 60 * 1000
"""Ray closes connections with a process that is stopped for 20 s, and then takes the process for dead. On one machine
`ProcessWatch` sees which process ended."""
_MOST_STARTS = 2
_LOOK_S = 2.0
_LOOK_TIMEOUT_S = 1.0
_MOST_FAILED = 3
"""Looks in a row: one may fail where a machine is busy."""
_STARTING = ProcessLock(
    PoolError,
    "another thread of this process starts Ray, which connects a process to one cluster at a time. Start one executor "
    "after the other, or each in a process of its own",
)


class Cluster:
    """A cluster that this process is connected to.

    Args:
        address: `"local"` starts one on this machine and ignores `RAY_ADDRESS`; else the address of one to join.
        num_cpus: slots of CPU pools of a local cluster; None: one per core.
        object_store_bytes: shared memory of a local cluster; None for one to join.
        log_to_driver: show what workers print.

    Raises:
        ConfigError: if this machine lacks what a local cluster needs; see `hf_controller.check_local_start`.
        PoolError: if Ray already runs in this process, refuses the address or the sizes, cannot start, or cannot
            connect to a cluster at the address.
    """

    def __init__(
        self, *, address: str, num_cpus: int | None, object_store_bytes: int | None, log_to_driver: bool
    ) -> None:
        with _STARTING.held(timeout_s=0.0), _keeping_sigterm():
            if ray.is_initialized():
                raise PoolError(
                    "Ray already runs in this process. Close the other executor, or call ray.shutdown() first"
                )
            self._connect(address, num_cpus, object_store_bytes, log_to_driver=log_to_driver)

    def _connect(
        self, address: str, num_cpus: int | None, object_store_bytes: int | None, *, log_to_driver: bool
    ) -> None:
        self._watchdog: Watchdog | None = None
        self._services: dict[str, subprocess.Popen[Any]] = {}
        self._gcs: Reachability | None = None
        self._spilling: SpillCheck | None = None
        self._address = address
        self.is_lost = False
        is_local = address == "local"
        num_cpus = num_cpus or (read_machine_limits().num_cpus if is_local else None)
        if is_local:
            check_local_start(num_cpus or 1)
        # A program may end, or drop its executor, without closing it.
        atexit.register(self.stop)
        _set_environment()
        options: dict[str, Any] = {
            "log_to_driver": log_to_driver,
            "logging_level": logging.CRITICAL,
            "job_config": _JobWithoutPath(),
        }
        if is_local:
            options |= {
                "num_cpus": num_cpus,
                "object_store_memory": object_store_bytes,
                "include_dashboard": False,
                "_temp_dir": str(Path(find_temp_dir()[0], "ray")),
                "_system_config": {
                    "prestart_worker_first_driver": False,
                    "enable_worker_prestart": False,
                    **dict.fromkeys(_CONNECTION_LIMITS, _PATIENCE_MS),
                },
            }
        with ExitStack() as undo:
            undo.push(self._stop_after)
            with quiet_ray(), _in_process_groups_of_their_own() as started:
                if is_local:
                    self._start(options)
                    self._services = _find_services(started)
                else:
                    _join(address, options)
                    self._gcs = Reachability(ray.get_runtime_context().gcs_address)
            undo.pop_all()

    def _stop_after(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.stop(keeps_logs=isinstance(error, PoolError))
        if isinstance(error, SystemExit) and error.code == signal.SIGTERM:
            # Ray's own handler, which it has while it starts, exits with the signal's number.
            raise SystemExit(128 + signal.SIGTERM) from None

    def check(self) -> None:
        """Refuses to go on without the cluster's own processes.

        Raises:
            LostClusterError: naming the process of a local cluster that ended, and how, or why the other one does not
                answer.
        """
        self._look_for_spilling()
        for name, process in self._services.items():
            code = process.poll()
            if code is not None:
                self.is_lost = True
                how = ProcessEnd(signal=-code) if code < 0 else ProcessEnd(exit_code=code)
                raise LostClusterError(
                    f"the local Ray cluster is lost: its {name}, process {process.pid}, is gone: {how}. A new "
                    "executor starts another one",
                    is_local=True,
                )
        if self._gcs is not None and (reason := self._gcs.find_loss()):
            self.is_lost = True
            raise LostClusterError(
                f"the Ray cluster at {self._address} is lost: its GCS takes no connections any more ({reason}). Start "
                "the cluster, and then the run, again",
                is_local=False,
            )

    def announce(self, num_bytes: int) -> None:
        """Warns, once, of a batch of so many bytes that is about to be stored and does not fit in a local cluster."""
        if self._spilling is not None and self._spilling.announce(num_bytes):
            self._spilling = None

    def resume_stopped(self) -> list[str]:
        """Continues the cluster's own processes that a signal such as SIGSTOP holds, and returns what they are called.

        Ray waits without end for their answers: when it starts an actor, and when it is shut down.
        """
        stopped = {name: process for name, process in self._services.items() if is_stopped(process.pid)}
        for process in stopped.values():
            process.send_signal(signal.SIGCONT)
        return list(stopped)

    @contextmanager
    def starting(self, role: str, deadline: Deadline) -> Iterator[None]:
        """Ends a start of workers that hangs because the cluster's own processes do not answer.

        Args:
            role: whose workers, for the message.
            deadline: of the start. After it, stopped processes of the cluster are continued, so that the start ends.

        Raises:
            WorkerTimeoutError: naming what was stopped, at the end of the start.
        """
        ends_s = time.monotonic() + deadline.seconds
        with self._continuing(deadline.seconds) as stopped:
            try:
                yield
            except HybridFlowError:
                if time.monotonic() >= ends_s:  # a busy machine may not have looked yet
                    stopped.update(dict.fromkeys(self.resume_stopped()))
                if not stopped:
                    raise
        if stopped:
            raise WorkerTimeoutError(
                f"{role}.__init__ is not done after {deadline.seconds:g} s ({deadline.key}): the "
                f"{' and the '.join(stopped)} of the cluster was stopped, as by SIGSTOP. Start again"
            )

    @contextmanager
    def _continuing(self, after_s: float) -> Iterator[dict[str, None]]:
        """Calls `resume_stopped` again and again in a thread, from `after_s` on until the block ends.

        Yields the names of what was stopped, which grow.
        """
        stopped: dict[str, None] = {}
        is_over = threading.Event()

        def look() -> None:
            wait_s = after_s
            while not is_over.wait(wait_s):
                stopped.update(dict.fromkeys(self.resume_stopped()))
                wait_s = _LOOK_S

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield stopped
        finally:
            is_over.set()
            thread.join()

    def stop(self, *, keeps_logs: bool = False) -> None:
        """Leaves the cluster; a local one ends with all its processes and files.

        Args:
            keeps_logs: leave the files of a local one, whose logs an error names.
        """
        atexit.unregister(self.stop)
        self._look_for_spilling()
        with self._continuing(0.0):
            ray.shutdown()
        if self._watchdog is not None:
            self._watchdog.dismiss(keeps_logs=keeps_logs)

    def _look_for_spilling(self) -> None:
        if self._spilling is not None and self._spilling.look():
            self._spilling = None

    def _start(self, options: dict[str, Any]) -> None:
        """Starts a local cluster, and a second one if the processes of the first gave up waiting for each other. Ray
        lets them wait for a few seconds only, which is too short on a busy machine.
        """
        given = {name: options[name] for name in ("num_cpus", "object_store_memory")}
        for starts_left in reversed(range(_MOST_STARTS)):
            with Caught() as caught:
                self._watchdog = Watchdog(options["_temp_dir"])
                ray.init(address="local", **options)
            if caught.error is None:
                break
            if isinstance(caught.error, HybridFlowError):
                raise caught.error
            if isinstance(caught.error, ValueError) or not starts_left:
                raise self._describe_start(given, caught.error) from caught.error
            self.stop()
            atexit.register(self.stop)
        assert self._watchdog is not None
        self._spilling = SpillCheck(self._watchdog.find_sessions(), options["object_store_memory"])

    def _describe_start(self, given: Mapping[str, Any], error: BaseException) -> PoolError:
        """Says why Ray's start, which raises errors of many kinds, failed."""
        if isinstance(error, ValueError):
            return PoolError(f"the local Ray cluster did not start with {given}: {_in_one_line(error)}")
        logs = self._watchdog.find_sessions() if self._watchdog is not None else []
        where = f"see Ray's logs in {logs[-1]}/logs, and " if logs else ""
        return PoolError(
            f"the local Ray cluster did not start: {type(error).__name__}: {_in_one_line(error)}. For the reason "
            f"{where}the limits of this machine (hybridflow doctor)"
        )


@contextmanager
def _keeping_sigterm() -> Iterator[None]:
    """Puts the program's handler back: Ray sets one of its own when it starts, and leaves it."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is not before:
            signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


class _JobWithoutPath(JobConfig):
    """Ray puts the working directory and the program's before everything else on the path of every worker, where a
    user's file hides the installed module of its name. Workers get the program's path themselves, behind their own.
    """

    def _serialize(self) -> str:
        self._py_driver_sys_path.clear()
        return super()._serialize()


def _join(address: str, options: dict[str, Any]) -> None:
    host, colon, port = address.rpartition(":")
    with raised_as(partial(_describe_join, address)):
        if colon and port.isdigit() and "://" not in address:
            # Ray itself tries for minutes.
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_TIMEOUT_S).close()
        ray.init(address=address, **options)


def _describe_join(address: str, error: BaseException) -> PoolError:
    """Says why Ray's client, which raises errors of many kinds, joined no cluster."""
    if isinstance(error, ValueError):
        return PoolError(
            f"cannot connect to a Ray cluster at {show(address)}: {_in_one_line(error)}. Correct the address"
        )
    return PoolError(
        f"cannot connect to a Ray cluster at {show(address)} ({_in_one_line(error.__cause__ or error)}). Start it with "
        "`ray start --head`, give the address that it prints, and set RAY_AUTH_MODE and its token alike here and there"
    )


def _in_one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= _MOST_REASON else f"{text[:_MOST_REASON]}..."


@contextmanager
def _in_process_groups_of_their_own() -> Iterator[list[subprocess.Popen[Any]]]:
    """Puts the processes that Ray starts into groups of their own.

    A signal to the program's group, as `timeout` sends it, would end the object store before the program has ended its
    run. Ray then exits with status 1 and no message. A block that fails ends these processes and their children.
    """
    if sys.platform != "linux":  # Ray ends them by the program's group there
        yield []
        return
    started: list[subprocess.Popen[Any]] = []

    def start_apart(popen: Any, *arguments: Any, **options: Any) -> subprocess.Popen[Any]:
        with shielded():
            options["env"] = without_quiet(options["env"])
            started.append(popen(*arguments, **options, process_group=0))
        return started[-1]

    with starting_by(start_apart), ExitStack() as undo_start:
        undo_start.callback(_end_start, started)
        yield started
        undo_start.pop_all()


def _end_start(started: Sequence[subprocess.Popen[Any]]) -> None:
    with shielded():
        ray.shutdown()  # first: Ray's client may end a program whose cluster is gone
        _end_groups(started)


def _end_groups(started: Sequence[subprocess.Popen[Any]]) -> None:
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in started:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_TIMEOUT_S)


def _find_services(started: Sequence[subprocess.Popen[Any]]) -> dict[str, subprocess.Popen[Any]]:
    """The processes without which a cluster does not go on, by what messages call them."""
    names = {"gcs_server": "GCS", "raylet": "raylet"}
    programs = {os.path.basename(_program_of(process)): process for process in started}
    return {name: programs[program] for program, name in names.items() if program in programs}


def _program_of(process: subprocess.Popen[Any]) -> str:
    arguments: Any = process.args
    return str(arguments[0])


def _set_environment() -> None:
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    start_workers_without_uv()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ranks are what the machine is for; Ray has its workers yield to every other program, for minutes on a busy one.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # A raylet often looks for its object store before that listens, and then waits: by default for a second, ten times.
    os.environ.setdefault("RAY_raylet_client_connect_timeout_milliseconds", "20")
    os.environ.setdefault("RAY_raylet_client_num_connect_attempts", "500")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Nobody reads all objects of a call that failed: the error of the call, or of its block, reports the failure once.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    # Lines that many ranks print alike are printed once, without Ray's hint of how to change that.
    log_once("log_dedup_warning")


class Reachability:
    """Connects to a process every two seconds; `find_loss` may be called as often as one likes.

    Args:
        address: `host:port`.
        clock: seconds that only grow.
    """

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        host, _, port = address.rpartition(":")
        self._place = (host.strip("[]"), int(port))
        self._clock = clock
        self._looked_s = clock()
        self._num_failed = 0
        self._reason = ""

    def find_loss(self) -> str:
        """Returns why the last connections failed, once several in a row did; else an empty string."""
        if self._num_failed < _MOST_FAILED and self._clock() - self._looked_s >= _LOOK_S:
            self._look()
            self._looked_s = self._clock()
        return self._reason if self._num_failed >= _MOST_FAILED else ""

    def _look(self) -> None:
        try:
            socket.create_connection(self._place, timeout=_LOOK_TIMEOUT_S).close()
        except OSError as error:
            self._num_failed += 1
            self._reason = error.strerror or str(error)
        else:
            self._num_failed = 0
