"""Interface between the backend and a server of either engine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from hf_engine.backends.base import SamplingParams
from hf_engine.model_directory import ModelDirectory
from hf_protocols.errors import BackendError
from hf_protocols.models import ModelShape

__all__ = ["Dialect", "Sample", "ServerFacts", "require_version"]


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """Facts that a server reports about itself."""

    name: str
    """Name in messages: engine and URL."""
    url: str
    architectures: tuple[str, ...]
    """Of the model, as its config.json names them."""
    dtype: str
    """Of weights and computation, by torch's name."""
    max_positions: int
    """Tokens that prompt and response may have together."""
    cache_tokens: int
    """Tokens whose keys and values fit its memory."""
    has_seeds: bool
    """True if the server draws a sample from the seed of its request."""
    seeds_knob: str
    """Option with which the server must be started for `has_seeds`."""
    keeps_tied: bool
    """True if an output layer that is the embedding keeps its old weights in an update."""
    experts: tuple[str, ...] | None
    """Families of experts that are right after an update, by `model_type`; None for all."""
    can_release: bool
    """True if the server was started so that it releases the cache's memory on request."""
    stamp: str
    """The server's name for its weights."""


@dataclass(frozen=True)
class Sample:
    """One response."""

    token_ids: list[int]
    logprobs: list[float]
    """Aligned with `token_ids`."""
    is_stopped: bool
    """By a stop token or string; else it is as long as it may be."""
    stamp: str
    """The server's name for the weights that the response was drawn from."""

    def cut(self, length: int | None) -> Sample:
        """Returns the response up to the token that completes a stop string; None: the whole response."""
        return (
            self
            if length is None
            else replace(self, token_ids=self.token_ids[:length], logprobs=self.logprobs[:length], is_stopped=True)
        )


class Dialect(Protocol):
    """One server."""

    @property
    def facts(self) -> ServerFacts:
        """As they were when it was found."""
        ...

    def knows(self, token_id: int) -> bool:
        """Returns True if the token is in the server's vocabulary."""
        ...

    def find_model_fault(self, model: ModelDirectory, shape: ModelShape) -> str | None:
        """Says what of a model the server's engine leaves out or does not run; None where nothing is known."""
        ...

    def find_unsupported(self, sampling: SamplingParams) -> str | None:
        """Returns the reason why the server cannot draw so, or cannot report full log-probs; None where it can."""
        ...

    def generate(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], sampling: SamplingParams, stops: Sequence[int]
    ) -> list[Sample]:
        """One response to every prompt; stop strings are not looked at.

        Raises:
            BackendError: if the server refuses, or its weights are not those that were loaded last.
        """
        ...

    def load_weights(self, directory: Path, stamp: str) -> None:
        """Replaces all weights by the safetensors files of a directory, and drops the prefix cache.

        Args:
            directory: as the server's machine sees it.
            stamp: what the server will name its weights.

        Raises:
            BackendError: if it does not take them.
        """
        ...

    def flush(self) -> None:
        """Drops the prefix cache."""
        ...

    def release(self) -> None:
        """Frees the memory of the cache; only where `facts.can_release`."""
        ...

    def resume(self) -> None:
        """Takes it again."""
        ...


def require_version(name: str, found: str, oldest: tuple[int, ...], too_new: tuple[int, ...]) -> None:
    """Refuses a server that was not tried.

    Raises:
        BackendError: naming the versions that were.
    """
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[: len(oldest)])
    if not oldest <= numbers < too_new:
        wanted = f">={'.'.join(map(str, oldest))},<{'.'.join(map(str, too_new))}"
        raise BackendError(f"{name} is version {found}, supported are {wanted}. Start one of these")
