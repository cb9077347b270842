"""Workloads of `bench_end_to_end.py`, the same for every system, and how a system answers the benchmark.

Nothing here imports a trainer, so that each system reads it in its own environment.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "GOAL",
    "SEED",
    "VALUE_WEIGHT",
    "WORKLOADS",
    "Goal",
    "Pacer",
    "Race",
    "Workload",
    "draw_prompts",
    "open_answers",
    "score",
    "score_copies",
    "start_ranks",
]

_PR_SET_PDEATHSIG = 1
_IS_FURTHER = "END_TO_END_FURTHER_RANK"
"""Variable of a rank's environment that another rank has started."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The samples and sizes of an iteration, which has one optimizer step."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    prompt_tokens: tuple[int, int]
    """Of the shortest and the longest prompt."""
    num_prompts: int
    num_samples: int
    """Of each prompt."""
    new_tokens: int
    """Of every response; of ragged ones the most."""
    algorithm: Literal["grpo", "ppo"] = "grpo"
    end_logit: float | None = None
    """Mean logit of the end token, so that responses end at random lengths; None: all are full."""
    learning_rate: float = 1e-5
    """Of every optimizer."""

    @property
    def is_ragged(self) -> bool:
        """True if the end token decides on lengths."""
        return self.end_logit is not None

    @property
    def num_rows(self) -> int:
        """Responses of an iteration."""
        return self.num_prompts * self.num_samples

    @property
    def max_positions(self) -> int:
        """Tokens of the longest row."""
        return self.prompt_tokens[1] + self.new_tokens


_SMALL = {"hidden_size": 128, "intermediate_size": 384, "num_layers": 4, "num_heads": 4}
_MIDDLE = {"hidden_size": 384, "intermediate_size": 1024, "num_layers": 6, "num_heads": 6}
WORKLOADS = {
    "tiny": Workload(**_SMALL, prompt_tokens=(4, 6), num_prompts=16, num_samples=8, new_tokens=5),
    "shared_prompts": Workload(**_MIDDLE, prompt_tokens=(256, 256), num_prompts=2, num_samples=8, new_tokens=48),
    "long_answers": Workload(
        **_MIDDLE,
        prompt_tokens=(32, 32),
        num_prompts=2,
        num_samples=8,
        new_tokens=256,
        end_logit=-3.0,
        learning_rate=1e-12,  # leaves lengths as they are: policies that learn come to different ones
    ),
    "tiny_ppo": Workload(**_SMALL, prompt_tokens=(4, 6), num_prompts=128, num_samples=1, new_tokens=5, algorithm="ppo"),
}
"""Policies of 0.8, 10.6, 10.6 and 0.8 million parameters; a critic is as large."""
SEED = 0
"""Of our timed runs. It decides the order of prompts, which GRPO's peer is given, too: prompts decide on lengths."""
VALUE_WEIGHT = 0.1
"""Of the critic's loss in TRL's one loss of PPO."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A held-out score that training has to reach, and how it trains."""

    workload: str
    score: float
    """Mean of the likeliest responses to held-out prompts."""
    num_prompts: int
    """Held out: the last ones that are drawn."""
    every: int
    """Iterations between two evaluations."""
    most: int
    """Iterations."""
    learning_rate: float
    betas: tuple[float, float]


GOAL = Goal(workload="tiny", score=0.6, num_prompts=64, every=5, most=900, learning_rate=5e-4, betas=(0.9, 0.999))


def draw_prompts(workload: Workload, count: int) -> list[str]:
    """Texts of digits, one token a character, no two alike."""
    draw = random.Random(0)
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(draw.choices("0123456789", k=draw.randint(*workload.prompt_tokens)))] = None
    return list(found)


def score(completions: list[str], **_: object) -> list[float]:
    """The share of characters that are below five: it differs inside every group."""
    return [sum(each in "01234" for each in text) / max(1, len(text)) for text in completions]


def score_copies(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """The share of characters that are the prompt's last one: what a race has to learn."""
    pairs = zip(prompts, completions, strict=True)
    return [text.count(prompt[-1]) / max(1, len(text)) for prompt, text in pairs]


def start_ranks(count: int) -> bool:
    """Starts this program again for each further rank, with the environment that launchers set.

    A rank that fails ends the others, whose connections break; none lives longer than the first one.

    Returns:
        True in the first rank, which is this process. Further ranks neither read commands nor answer.
    """
    if count == 1 or _IS_FURTHER in os.environ:
        return _IS_FURTHER not in os.environ
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    shared["LOCAL_WORLD_SIZE"] = shared["WORLD_SIZE"]
    for rank in range(1, count):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), _IS_FURTHER: "1"}
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env=os.environ | shared | own,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )
    os.environ.update(shared, RANK="0", LOCAL_RANK="0")
    return True


def open_answers(descriptor: int | None) -> Callable[[Any], None]:
    """Returns what writes one answer; without a descriptor, what writes none."""
    if descriptor is None:
        return lambda _: None
    file = os.fdopen(descriptor, "w")

    def answer(value: Any) -> None:
        file.write(json.dumps(value) + "\n")
        file.flush()

    return answer


class Pacer:
    """Stops a trainer between segments of iterations, and reports the seconds of each iteration by phase.

    After the last segment it waits until its input ends, and ends the program: what a trainer does at the end of a run
    would take the time of the system that is measured next.

    Args:
        answer: takes an object when a segment has ended.
        segments: iterations of each.
        reads: False for a further rank, which reads no commands.
        join: called by all ranks after the first one has read a command, so that the others wait for it.
    """

    def __init__(
        self,
        answer: Callable[[Any], None],
        segments: list[int],
        *,
        reads: bool = True,
        join: Callable[[], object] = lambda: None,
    ) -> None:
        self._answer, self._segments, self._reads, self._join = answer, list(segments), reads, join
        self._rows: list[dict[str, float]] = []
        self.phases: dict[str, float] = defaultdict(float)
        self._start_s = time.perf_counter()

    def start(self) -> None:
        """Says that everything is built, and waits for the first command."""
        self._answer([])
        self._wait()

    def end_iteration(
        self, phases: dict[str, float] | None = None, seconds: float | None = None, **counted: float
    ) -> None:
        """Takes down an iteration, of the time since the last one; waits for the next command where a segment ends.

        Args:
            phases: seconds by phase; None: what was added to `self.phases`.
            seconds: of the iteration, in place of the time since the last one.
            counted: of the iteration: `tokens`, the mean of its responses, and `padding`, its share in an update.
        """
        wall_s = time.perf_counter() - self._start_s if seconds is None else seconds
        self._rows.append({"wall": wall_s, **(self.phases if phases is None else phases), **counted})
        self.phases.clear()
        if len(self._rows) == self._segments[0]:
            self._answer(self._rows)
            self._rows = []
            del self._segments[0]
            self._wait()
        self._start_s = time.perf_counter()

    def _wait(self) -> None:
        if self._reads and not sys.stdin.readline():
            sys.exit("nobody waits for the next segment" if self._segments else 0)
        self._join()
        self._start_s = time.perf_counter()


class Race:
    """Adds up the seconds of iterations until a score is reached. Evaluations are not timed.

    Args:
        answer: takes the seconds and the iterations, or None where the score was not reached.
    """

    def __init__(self, answer: Callable[[Any], None]) -> None:
        self._answer = answer
        self._seconds, self._iterations = 0.0, 0
        self._start_s = time.perf_counter()
        self.is_over = False

    def start(self) -> None:
        """Says that everything is built, and begins to count."""
        self._answer([])
        self._start_s = time.perf_counter()

    def end_iteration(self, seconds: float | None = None) -> None:
        """Takes down an iteration: the time since the last one, or its seconds where it was evaluated, too."""
        self._seconds += time.perf_counter() - self._start_s if seconds is None else seconds
        self._iterations += 1
        self._start_s = time.perf_counter()

    def judge(self, found: float) -> None:
        """Takes the score of an evaluation."""
        if found >= GOAL.score and not self.is_over:
            self.is_over = True
            self._answer({"seconds": self._seconds, "iterations": self._iterations})
        self._start_s = time.perf_counter()

    def give_up(self) -> None:
        """No more iterations are made."""
        if not self.is_over:
            self._answer(None)
