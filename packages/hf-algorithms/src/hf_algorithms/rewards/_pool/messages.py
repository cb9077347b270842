"""Values that travel between a worker, its host and the host's processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hf_algorithms.rewards._result_numbers import WrongResult
from hf_algorithms.rewards._results import CallScores

__all__ = ["CallExpired", "Calls", "CrashedCall", "ExpiredCall", "Outcome", "RaisedCall", "Setup"]


class CallExpired(Exception):  # noqa: N818 - a user's function may raise it, for a deadline of its own
    """A reward function exceeded its deadline: its responses cannot be scored."""


class Calls(NamedTuple):
    """Calls of one function. Without their arguments they are quick to copy: many travel in one message.

    Attributes:
        function: its index in the pool.
        per_sample: each call is for one response.
        is_async: calls may wait at the same time.
        deadline_s: after which a call is given up, for each response in it.
        num_rows: responses in each call.
        payloads: pickled positional and keyword arguments of each call.
    """

    function: int
    per_sample: bool
    is_async: bool
    deadline_s: float
    num_rows: list[int]
    payloads: list[bytes]

    def select(self, indices: Sequence[int]) -> Calls:
        """Returns some of the calls."""
        num_rows, payloads = self.num_rows, self.payloads
        return self._replace(
            num_rows=[num_rows[index] for index in indices], payloads=[payloads[index] for index in indices]
        )


@dataclass(frozen=True)
class RaisedCall:
    """The function raised; the text has the place in its code."""

    text: str
    is_load: bool = False
    """True where its module could not be loaded."""


@dataclass(frozen=True)
class ExpiredCall:
    """The call exceeded its deadline and was given up."""

    deadline_s: float


@dataclass(frozen=True)
class CrashedCall:
    """The call ended its process."""

    exit_code: int


Outcome = CallScores | WrongResult | RaisedCall | ExpiredCall | CrashedCall
"""Of one call."""


class Setup(NamedTuple):
    """A host's first message: pickled loaders of functions, and how many processes call them."""

    loaders: list[bytes]
    num_processes: int
