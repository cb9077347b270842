from __future__ import annotations

import contextlib
import signal
import subprocess
import sys

import pytest

from hf_controller.signals import SignalGuard, after_imports, send_lost_signals_again, shielded

pytestmark = pytest.mark.usefixtures("other_guards_hear_nothing")


@pytest.fixture(autouse=True)
def ctrl_c_is_heard():
    """A shell's background job, as these tests may be, is started with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def guard():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.unraisablehook
    guard = SignalGuard()
    guard.install()
    yield guard
    guard.restore()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.unraisablehook) == before


def test_sigterm_is_an_exception_with_the_usual_exit_code(guard):
    with pytest.raises(SystemExit) as error:
        signal.raise_signal(signal.SIGTERM)
    assert error.value.code == 143


def test_ctrl_c_stays_what_it_is(guard):
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with guard.watching():
        pass  # it was raised once, and is not raised again


def test_ctrl_c_that_was_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard = SignalGuard()
    guard.install()
    signal.raise_signal(signal.SIGINT)
    guard.restore()
    assert signal.signal(signal.SIGINT, before) is signal.SIG_IGN


def swallow(kind: int) -> None:
    """Swallows an interrupt, as a library should not do."""
    with contextlib.suppress(BaseException):
        signal.raise_signal(kind)


@pytest.mark.parametrize(("kind", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_an_exception_swallowed_during_a_wait_is_raised_again(guard, kind, error):
    with pytest.raises(error) as raised, guard.watching():
        swallow(kind)
    assert getattr(raised.value, "code", 143) == 143


@pytest.mark.parametrize(("kind", "exit_code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_an_import_is_finished_before_a_signal_ends_the_program(tmp_path, kind, exit_code):
    program = (
        "import signal, sys, time\n"
        "from hf_controller.signals import SignalGuard, after_imports\n"
        "signal.signal(signal.SIGINT, after_imports(lambda kind, frame: sys.exit(130)))\n"
        "SignalGuard().install()\n"
        "try:\n"
        "    import interrupted\n"
        "    print('imported', flush=True)\n"
        "    time.sleep(60)\n"
        "finally:\n"
        "    print(interrupted.VALUE)\n"
    )
    (tmp_path / "interrupted.py").write_text(
        f"import signal, time\nsignal.raise_signal(signal.{kind})\ntime.sleep(0.2)\nVALUE = 'whole'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (exit_code, ["imported", "whole"]), done.stderr
    assert done.stderr == ""


def test_a_signal_does_not_wait_for_an_import_without_an_end(monkeypatch):
    monkeypatch.setattr("hf_controller.signals._is_importing", lambda frame: True)
    monkeypatch.setattr("hf_controller.signals._LONGEST_IMPORT_S", 0.0)
    heard = []
    after_imports(lambda kind, frame: heard.append(kind))(signal.SIGTERM, None)
    assert heard == [signal.SIGTERM]


def test_a_swallowed_termination_is_raised_by_the_next_wait(guard):
    swallow(signal.SIGTERM)
    with pytest.raises(SystemExit), guard.watching():
        pass


def test_code_that_ends_the_program_in_order_may_still_wait(guard):
    with pytest.raises(SystemExit):  # noqa: PT012
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            with guard.watching():
                finished = True
    assert finished


def change(kind: int) -> None:
    """Ray does this."""
    try:
        signal.raise_signal(kind)
    except SystemExit:
        sys.exit(1)


def test_an_exception_that_a_library_changes_is_raised_as_it_was(guard):
    with pytest.raises(SystemExit) as raised, guard.watching():
        change(signal.SIGTERM)
    assert raised.value.code == 143


def test_an_exception_in_a_finalizer_is_raised_by_the_next_wait(guard):
    class Finalized:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    Finalized()
    with pytest.raises(KeyboardInterrupt), guard.watching():
        pass
    with guard.watching():
        pass


@pytest.mark.parametrize(("kind", "exit_code"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_a_signal_in_a_finalizer_ends_a_program(kind, exit_code):
    program = (
        "import signal, sys, time\n"
        "from hf_controller.signals import Terminated, after_imports, send_lost_signals_again\n"
        "def end(kind, frame):\n"
        "    raise Terminated(128 + kind)\n"
        f"signal.signal(signal.{kind}, after_imports(end))\n"
        "send_lost_signals_again()\n"
        "class Finalized:\n"
        "    def __del__(self):\n"
        f"        signal.raise_signal(signal.{kind})\n"
        "Finalized()\n"
        "print('goes on', flush=True)\n"
        "time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (exit_code, "goes on\n", "")


def test_other_errors_of_finalizers_are_shown(capfd):
    class FailingFinalizer:
        def __init__(self, error):
            self.error = error

        def __del__(self):
            raise self.error

    before = sys.unraisablehook
    sys.unraisablehook = sys.__unraisablehook__
    try:
        send_lost_signals_again()
        FailingFinalizer(ValueError("a fault"))
        FailingFinalizer(SystemExit(3))
    finally:
        sys.unraisablehook = before
    shown = capfd.readouterr().err
    assert "ValueError: a fault" in shown and "SystemExit: 3" in shown


def test_other_exits_pass_through(guard):
    with pytest.raises(SystemExit) as raised, guard.watching():
        sys.exit(5)
    assert raised.value.code == 5


def test_shielded_delivers_a_signal_afterwards():
    finished = []
    with pytest.raises(KeyboardInterrupt), shielded():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        finished.append(True)
    assert finished
