"""Display of a run while it runs: a live panel on a terminal, one plain line per event anywhere else."""

from __future__ import annotations

import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from hf_protocols.drawing import format_sparkline

__all__ = ["RunDisplay", "build_console"]

# Name in the metrics, label, format; what ends in a slash begins names whose rest is the label.
_SHOWN = (
    ("reward/mean", "reward", "{:.3f}"),
    ("ranking/loss", "loss", "{:.3f}"),
    ("supervised/loss", "train loss", "{:.3f}"),
    ("preference/loss", "loss", "{:.3f}"),
    ("eval/validation/", "", "{:.3f}"),
    ("kl_sequence/k3", "KL", "{:.3f}"),
    ("perf/tokens_per_s", "tokens/s", "{:,.0f}"),
)
_HISTORY = 40
# Iterations whose mean duration predicts the rest: enough to be steady, few enough to follow a change.
_WINDOW = 20
_QUIET_S = 15.0
"""Time without a line after which the phase is printed again; it then doubles each time."""


def build_console() -> Console:
    """Returns a console as wide as the terminal or `COLUMNS`; in a pipe or a file, as wide as anything printed."""
    return Console(width=shutil.get_terminal_size((10_000, 24)).columns)


class RunDisplay:
    """Shows phases, iterations and notes of a run; a context manager.

    Args:
        total_iterations: the iterations that the run will make, for the bar and the remaining time.
        console: where to; None is standard output. A console that is not an interactive terminal gets plain lines.
        clock: seconds that only grow.
        quiet_s: time without a line after which plain output says what still runs.
        started_s: when the run's checks began, by the clock; None: now.
    """

    def __init__(
        self,
        total_iterations: int,
        console: Console | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        quiet_s: float = _QUIET_S,
        started_s: float | None = None,
    ) -> None:
        self._total = total_iterations
        self._console = console or Console()
        self._clock = clock
        self._ends_s: deque[float] = deque([clock()], maxlen=_WINDOW + 1)
        # Replaced, never changed: the panel's own thread reads them at any time.
        self._known: Mapping[str, float] = {}
        self._rewards: tuple[float, ...] = ()
        self._exit = ExitStack()
        self._quiet_s = quiet_s
        self._doing = ""
        self._phases: dict[str, float] = {}
        self._phase = ("checks", clock() if started_s is None else started_s)
        self._last_line_s = clock()
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[eta]}"),
            console=self._console,
            expand=True,
        )
        self._task = self._progress.add_task("starting", total=total_iterations, eta="")

    def __enter__(self) -> RunDisplay:
        if self._is_live:
            self._exit.enter_context(Live(console=self._console, get_renderable=self._render, refresh_per_second=8))
        else:
            ended = threading.Event()
            reminder = threading.Thread(target=self._remind, args=(ended,), daemon=True)
            self._exit.callback(reminder.join)
            self._exit.callback(ended.set)
            reminder.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    def phase(self, text: str) -> None:
        """Names the phase that begins; the remaining time counts from here."""
        (before, start_s), now_s = self._phase, self._clock()
        self._phases[before] = self._phases.get(before, 0.0) + now_s - start_s
        self._phase = (text, now_s)
        self._ends_s.clear()
        self._ends_s.append(now_s)
        self._progress.update(self._task, description=text, eta="")
        if not self._is_live:
            self._print(text)
        self._doing = text  # the reminder repeats only what was printed

    @property
    def phases(self) -> Mapping[str, float]:
        """Seconds of each phase that has ended, `checks` first."""
        return dict(self._phases)

    def iteration(self, number: int, metrics: Mapping[str, float]) -> None:
        """Shows iteration `number` (from 1); a metric that is absent keeps its last known value."""
        self._ends_s.append(self._clock())
        self._known = {**self._known, **metrics}
        if "reward/mean" in metrics:
            self._rewards = (*self._rewards, metrics["reward/mean"])[-_HISTORY:]
        eta = f"ETA {_format_duration(self._remaining_s(number))}"
        self._progress.update(self._task, completed=number, eta=eta)
        if not self._is_live:
            width = len(str(self._total))
            numbers = [f"{label} {value}" for label, value in self._numbers()]
            self._print("  ".join([f"iteration {number:>{width}}/{self._total}", *numbers, eta]))
        self._doing = f"iteration {number + 1}" if number < self._total else self._doing

    def note(self, text: str) -> None:
        """Leaves a line above the panel."""
        self._print(text)

    @property
    def _is_live(self) -> bool:
        return self._console.is_interactive

    def _remind(self, ended: threading.Event) -> None:
        """Prints what still runs where nothing was printed for long, so that a slow start does not look like a hang."""
        wait_s, seen_s = self._quiet_s, self._last_line_s
        while not ended.wait(self._quiet_s / 4):
            if seen_s != self._last_line_s:
                wait_s, seen_s = self._quiet_s, self._last_line_s
            quiet_s = self._clock() - seen_s
            if self._doing and quiet_s >= wait_s:
                self._console.print(Text(f"{self._doing}, {quiet_s:.0f} s so far"), soft_wrap=True)
                wait_s *= 2

    def _print(self, text: str) -> None:
        self._last_line_s = self._clock()
        self._console.print(Text(text), soft_wrap=True)

    def _remaining_s(self, number: int) -> float:
        elapsed_s = self._ends_s[-1] - self._ends_s[0]
        return elapsed_s / (len(self._ends_s) - 1) * max(0, self._total - number)

    def _numbers(self) -> list[tuple[str, str]]:
        return [
            (label or name.removeprefix(shown), form.format(value))
            for shown, label, form in _SHOWN
            for name, value in self._known.items()
            if name == shown or (shown.endswith("/") and name.startswith(shown))
        ]

    def _render(self) -> Group:
        if not self._numbers():
            return Group(self._progress)
        cells = [Text.assemble((f"{label} ", "dim"), (value, "bold")) for label, value in self._numbers()]
        if not self._console.options.ascii_only:
            cells.append(Text(format_sparkline(self._rewards), style="green"))
        line = Text("    ")
        for cell in cells:  # the most important first; one that has no room is left out whole
            if line.cell_len + cell.cell_len <= self._console.width:
                line.append_text(cell).append("   ")
        return Group(self._progress, line)


def _format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
