"""The way of weights into generation and back: what a `HybridEngine` asks of it, what it did, and what is held then."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

import torch

from hf_engine.backends.base import RolloutBackend, TrainBackend
from hf_engine.backends.capabilities import SupportsBufferLoading, SupportsBuffers
from hf_engine.process_groups import wait_for_device
from hf_engine.resharding.execute import Parts, Weights
from hf_engine.resharding.plan import ReshardPlan

__all__ = ["CheckedWeights", "MovedWeights", "Transition", "TransitionMemory", "WeightNeed", "WeightTransition"]


@dataclass(frozen=True, kw_only=True)
class Transition:
    """Result of one entry into generation on this rank."""

    weight_version: int
    """Version of the weights that generation sees."""
    seconds: float
    """Wall time; 0 where nothing had to move."""
    recv_bytes: int
    """Bytes of weights received from other ranks."""
    fed_bytes: int
    """Bytes of weights handed to an engine that keeps its weights itself: of all, or of the adapters alone."""


@dataclass(frozen=True, kw_only=True)
class TransitionMemory:
    """Memory that one rank holds while it generates, in bytes; known before anything moves."""

    generation_bytes: int
    """The generation shard; 0 where the engine keeps it itself."""
    engine_bytes: int
    """Generation shard and KV cache of an engine that keeps its weights itself. 0 for others."""
    released_bytes: int
    """Part of these bytes that was released when generation last ended; 0 where nothing can be freed."""
    training: Literal["moved", "kept", "offloaded"]
    """Place of the training shard: inside the generation shard, next to it, or on the host."""
    training_bytes: int
    """Device bytes of the training shard next to the generation shard, less padding; 0 when moved or offloaded."""
    host_bytes: int
    """On the host: the training shard when offloaded; when moved, copies of what only training holds, and padding."""
    peak_bytes: int
    """The most bytes of training and generation weights that are live at once: on the way into generation, during it,
    and on the way back. If the training shard is moved, a parameter exists twice while it is copied. The peak may then
    exceed the generation shard, by the largest training storage at most or by the contents of one bucket; if the engine
    stacks the experts of a layer, also by such a stack. Parts that both layouts hold alike are lent to an engine of
    `SupportsWeightAdoption`, and never exist twice. If the training shard is moved, the padding of a training backend
    of `SupportsPadding` counts, too."""
    staging_bytes: int
    """Communication buffers, kept for the engine's lifetime. For an engine that keeps its weights itself also the
    shards on their way into it, and the memory that it needs to take them."""


class MovedWeights(NamedTuple):
    """Result of `WeightTransition.enter` on this rank."""

    recv_bytes: int = 0
    """Bytes of weights received from other ranks."""
    fed_bytes: int = 0
    """Bytes handed to an engine that keeps its weights itself."""


class WeightNeed(IntEnum):
    """The weights that a rank's rollout backend lacks."""

    NONE = 0
    ADAPTERS = 1
    ALL = 2


class CheckedWeights(NamedTuple):
    """Tensors of one rank that match its layouts."""

    source: Parts
    """Of the training backend."""
    target: Parts
    """Of the rollout backend; empty if it keeps its weights itself."""


class WeightTransition(ABC):
    """Brings training weights into a rollout backend and gives the memory back, without knowledge of versions.

    Args:
        train: the training backend.
        rollout: the rollout backend.
        plan: from the one's layout to the other's.
        offloads: the training weights wait on the host during generation.
    """

    def __init__(self, train: TrainBackend, rollout: RolloutBackend, plan: ReshardPlan, *, offloads: bool) -> None:
        self._train, self._rollout, self._plan = train, rollout, plan
        self._offloads = offloads

    @property
    def is_silent(self) -> bool:
        """True if ranks need not agree before an `enter`: it always moves weights, and sends none to other ranks."""
        return False

    @abstractmethod
    def find_need(self, *, is_stale: bool) -> WeightNeed:
        """Returns the weights that the next `enter` has to move.

        Args:
            is_stale: the training weights are not those that generation had last.
        """

    def forget(self) -> None:  # noqa: B027 - a way that moves everything each time has nothing to forget
        """Has the next `enter` move everything: what the rollout backend has is not known."""

    @abstractmethod
    def check(self, weights: Weights) -> CheckedWeights:
        """Returns what `enter` takes. Not collective.

        Args:
            weights: of the training backend.

        Raises:
            HybridFlowError: for tensors that do not match the plan.
        """

    @abstractmethod
    def enter(self, version: int, checked: CheckedWeights | None, need: WeightNeed) -> MovedWeights:
        """Leaves the rollout backend ready to generate from the training weights. Collective where they move.

        After an error the weights of the rollout backend are unknown: call `leave`, and move the weights next time.

        Args:
            version: of the weights.
            checked: of `check`; None where nothing moves: what the rollout backend has is current.
            need: the most that any rank needs. All ranks agreed on it.
        """

    @abstractmethod
    def leave(self, *, failed: bool) -> None:
        """Gives the memory back to training, also where the engine failed."""

    @abstractmethod
    def measure(self) -> TransitionMemory:
        """Returns the memory that this rank holds while it generates."""

    @torch.no_grad()
    def _commit(self, version: int) -> None:
        """Copies the state that no optimizer step changes, each tensor in its own dtype, and completes the weights."""
        found = self._train.buffers() if isinstance(self._train, SupportsBuffers) else {}
        if isinstance(self._rollout, SupportsBuffers):
            for name, buffer in self._rollout.buffers().items():
                buffer.copy_(found[name])
        elif found and isinstance(self._rollout, SupportsBufferLoading):
            self._rollout.load_buffers(found)
        wait_for_device()
        self._rollout.commit_weights(version)
