"""The way of weights into generation, as one rank sees it: what it did, and what it holds then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Transition", "TransitionMemory"]


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
    is_unchanged: bool
    """The backend says that its weights changed, but this rank's bits are those of the last transition: after a real
    optimizer step this points to a broken sync. False on a rank that holds no weights."""


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
    """The most bytes of training and generation weights that are live at once on the way into generation, in it and on
    the way back. Where the training shard is moved a parameter is there twice while it is copied: this may pass the
    generation shard, by the largest training storage at most or by what one bucket brings; where the engine stacks the
    experts of a layer by such a stack, too. What both layouts hold alike is lent to an engine that `AdoptsWeights`, and
    is never there twice. Where it is moved the padding of a training backend that `HoldsPadding` counts, too."""
    staging_bytes: int
    """Communication buffers, kept for the engine's lifetime; and for an engine that keeps its weights itself the shards
    on their way into it, with what it needs to take them."""
