from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console

from hf_algorithms.run.display import RunDisplay

METRICS = {"reward/mean": 0.5, "kl_sequence/k3": 0.0312, "perf/tokens_per_s": 3214.4, "actor/policy_loss": 1.0}


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def _console(*, terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, _environ={"TERM": "xterm"})


def test_plain_output_is_one_line_per_event():
    console, clock = _console(terminal=False), Clock()
    with RunDisplay(120, console, clock=clock) as display:
        display.phase("warm start")
        clock.now += 500
        display.note("step 10: exact match 0.100 [/not markup] " + "x" * 100)
        display.phase("ppo")
        clock.now += 2
        display.iteration(1, METRICS)
        clock.now += 4
        display.iteration(2, {**METRICS, "eval/validation/exact_match": 0.36})
        display.iteration(3, METRICS)
    lines = console.file.getvalue().splitlines()
    assert lines == [
        "warm start",
        "step 10: exact match 0.100 [/not markup] " + "x" * 100,
        "ppo",
        "iteration   1/120  reward 0.500  KL 0.031  tokens/s 3,214  ETA 3:58",
        "iteration   2/120  reward 0.500  exact_match 0.360  KL 0.031  tokens/s 3,214  ETA 5:54",
        "iteration   3/120  reward 0.500  exact_match 0.360  KL 0.031  tokens/s 3,214  ETA 3:54",
    ]


def test_a_long_phase_is_printed_again():
    console = _console(terminal=False)
    with RunDisplay(3, console, quiet_s=0.01) as display:
        display.phase("starting workers")
        give_up_s = time.monotonic() + 60
        while "so far" not in console.file.getvalue() and time.monotonic() < give_up_s:
            time.sleep(0.01)
    assert re.match(r"starting workers\nstarting workers, \d+ s so far\n", console.file.getvalue())


def test_the_remaining_time_follows_the_last_iterations():
    console, clock = _console(terminal=False), Clock()
    with RunDisplay(10_000, console, clock=clock) as display:
        for number in range(1, 101):
            clock.now += 100 if number <= 80 else 1
            display.iteration(number, METRICS)
    assert console.file.getvalue().splitlines()[-1].endswith("ETA 2:45:00")


def test_a_terminal_gets_a_panel_that_is_left_standing():
    console = _console(terminal=True)
    with RunDisplay(3, console) as display:
        display.phase("ppo")
        display.note("a note")
        for number in (1, 2, 3):
            display.iteration(number, {**METRICS, "reward/mean": number / 3, "eval/validation/exact_match": 0.6})
    text = console.file.getvalue()
    last = text[text.rindex("3/3") :]
    for part in ("exact_match", "0.600", "3,214", "ETA 0:00", "\u2581\u2584\u2588"):
        assert part in last
    assert "a note" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def test_values_that_are_not_finite_are_shown():
    for terminal in (False, True):
        console = _console(terminal=terminal)
        with RunDisplay(1, console) as display:
            display.iteration(1, {"reward/mean": float("nan"), "kl_sequence/k3": float("inf")})
        assert "nan" in console.file.getvalue()


def test_the_panel_goes_when_the_run_fails():
    console = _console(terminal=True)

    with pytest.raises(KeyboardInterrupt), RunDisplay(3, console):
        raise KeyboardInterrupt
    assert console.file.getvalue().count("\x1b[?25h") == 1


def test_the_seconds_of_phases_are_known_when_they_have_ended():
    clock = Clock()
    with RunDisplay(3, _console(terminal=False), clock=clock, started_s=98.5) as display:
        for name, seconds in (("starting workers", 1.0), ("warm start", 20.0), ("grpo", 3.0)):
            clock.now += seconds
            display.phase(name)
    assert display.phases == {"checks": 2.5, "starting workers": 20.0, "warm start": 3.0}
