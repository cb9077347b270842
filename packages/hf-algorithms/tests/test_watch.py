"""`hybridflow watch`: what a terminal shows of a run's files."""

from __future__ import annotations

import functools
import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from hf_algorithms.commands.watch import watch, watch_run
from hf_algorithms.report.live import LiveRun, open_runs
from hf_algorithms.report.terminal import draw_run

PROGRAM = Path(sys.executable).with_name("hybridflow")


def row(iteration: int) -> str:
    metrics = {
        "iteration": iteration,
        "reward/mean": iteration / 100,
        "actor/entropy": 2.0 + 0.001 * (iteration % 3) if iteration <= 30 else 0.5,
        "time/iteration_s": 2.0,
        "time/generate_s": 1.5,
        "time/train_s": 0.5,
    }
    return json.dumps(metrics) + "\n"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run of 40 iterations that goes on, with samples at iteration 20."""
    run = tmp_path / "my-run"
    (run / "samples").mkdir(parents=True)
    (run / "config.toml").write_text('[run]\niterations = 100\n[algorithm]\nname = "grpo"\n')
    (run / "metrics.jsonl").write_text("".join(map(row, range(1, 41))))
    samples = [{"prompt": f"{number}+1=", "response": f"it is {number + 1}", "score": 1.0} for number in range(3)]
    (run / "samples" / "20.jsonl").write_text("".join(json.dumps(each) + "\n" for each in samples))
    return run


def look(directory: Path) -> LiveRun:
    (run,) = open_runs([directory])
    run.refresh()
    return run


def read_lines(run: LiveRun, width: int = 100, height: int | None = None, *, ascii_only: bool = False) -> list[str]:
    return [line.plain for line in draw_run(run, width=width, height=height, ascii_only=ascii_only)]


def test_a_running_run_is_drawn(directory: Path) -> None:
    text = "\n".join(read_lines(look(directory)))
    assert "my-run  grpo  running  iteration 40 of 100  about 2:00 min left" in text
    assert "Reward                  0.01 -> 0.4" in text and "\u2581" in text and "\u2588" in text
    assert "entropy 0.5 below its band" in text
    assert "generate                1.5 s, 75%" in text
    assert "Samples of iteration 20, 3 rows" in text and "it is 3" in text


@pytest.mark.parametrize(("width", "height"), [(200, 60), (80, 24), (40, 12), (20, 5), (5, 1)])
def test_every_terminal_is_large_enough(directory: Path, width: int, height: int) -> None:
    for ascii_only in (False, True):
        lines = draw_run(look(directory), width=width, height=height, ascii_only=ascii_only)
        assert len(lines) <= height and all(line.cell_len <= width for line in lines)
        assert not ascii_only or all(line.plain.isascii() for line in lines)


def test_texts_of_a_run_do_not_move_the_cursor(directory: Path) -> None:
    hostile = {"prompt": "\x1b[2Jgone\r", "response": "[bold]a\n\u202eb", "score": 0.5}
    (directory / "samples" / "30.jsonl").write_text(json.dumps(hostile) + "\n")
    lines = read_lines(look(directory))
    assert all(line.isprintable() for line in lines)
    assert "[bold]a  b" in "\n".join(lines)


def test_a_killed_run_has_half_a_line(directory: Path) -> None:
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 41, "rewa')
    text = "\n".join(read_lines(look(directory)))
    assert "iteration 40 of 100" in text and "or killed: the last line is" in text


def test_a_run_that_ended_shows_its_result(directory: Path) -> None:
    shutil.rmtree(directory / "samples")
    error = {"type": "ConfigError", "message": "no"}
    (directory / "summary.json").write_text(json.dumps({"status": "failed", "error": error}))
    text = "\n".join(read_lines(look(directory)))
    assert "failed  iteration 40 of 100\nConfigError: no" in text
    assert "Samples" not in text


def test_a_run_that_vanishes_stays_as_it_was_read(directory: Path) -> None:
    run = look(directory)
    assert "it is 3" in "\n".join(read_lines(run))
    shutil.rmtree(directory)
    run.refresh()
    text = "\n".join(read_lines(run))
    assert "gone  iteration 40 of 100" in text and "0.01 -> 0.4" in text and "it is 3" in text


def test_a_long_run_is_drawn_before_it_is_read(directory: Path) -> None:
    with (directory / "metrics.jsonl").open("a") as file:
        file.writelines(map(row, range(41, 40_001)))
    run = look(directory)
    text = "\n".join(read_lines(run))
    assert "iteration 40,000 of 100" in text and "0.01 -> 400" in text
    run.finish_reading()


def test_the_key_q_leaves_and_new_lines_are_shown(directory: Path) -> None:
    terminal = {"TERM": "xterm"}  # TERM of the tests may be dumb
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=40, record=True, _environ=terminal)

    def press(timeout_s: float) -> str:
        if (directory / "summary.json").exists():
            return "q"
        with (directory / "metrics.jsonl").open("a") as file:
            file.write(row(41))
        (directory / "summary.json").write_text(json.dumps({"score_after": 0.5}))
        return ""

    watch_run(look(directory), console, press)
    text = console.export_text()
    assert "iteration 40 of 100" in text and "finished  iteration 41 of 100" in text and "q leaves" in text


def test_output_that_is_not_a_terminal_is_printed_once(directory: Path, tmp_path: Path) -> None:
    found = CliRunner().invoke(watch, [str(directory)])
    assert found.exit_code == 0 and "iteration 40 of 100" in found.output and "it is 3" in found.output
    (tmp_path / "empty").mkdir()
    refused = CliRunner().invoke(watch, [str(tmp_path / "empty")])
    assert str(refused.exception).startswith(f"RUN='{tmp_path / 'empty'}': it holds none of config.toml, metrics.jsonl")


@pytest.mark.parametrize(("leave", "code"), [("q", 0), (signal.SIGINT, 130)], ids=["q", "Ctrl-C"])
def test_a_terminal_is_left_as_it_was(directory: Path, leave: str | signal.Signals, code: int) -> None:
    import termios

    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    # A shell's background job, as these tests may be, ignores Ctrl-C; a user's program does not.
    hear_ctrl_c = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    program = subprocess.Popen([PROGRAM, "watch", directory], env=environment, preexec_fn=hear_ctrl_c, **pipes)
    try:
        seen, end_s = b"", time.monotonic() + 120
        while b"q leaves" not in seen and time.monotonic() < end_s:
            seen += os.read(ours, 1 << 16)
        if isinstance(leave, str):
            os.write(ours, leave.encode())
        else:
            program.send_signal(leave)
        assert program.wait(timeout=60) == code
        assert termios.tcgetattr(theirs) == before
        assert b"iteration 40 of 100" in seen
    finally:
        program.kill()
        program.wait()
        os.close(ours)
        os.close(theirs)
