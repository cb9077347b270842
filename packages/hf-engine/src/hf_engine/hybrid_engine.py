"""The colocated transition: one set of ranks trains and generates, the weights change their layout in between."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist

from hf_engine.backends._base import RolloutBackend, SamplingParams, SupportsWeightBuffers, TrainBackend
from hf_engine.process_groups import build_groups, local_device, wait_for_device
from hf_engine.resharding.digest import compute_digest
from hf_engine.resharding.execute import DEFAULT_BUCKET_BYTES, ReshardExecutor, as_parts, check_weights
from hf_engine.resharding.moving import ShardMover
from hf_engine.resharding.plan import ReshardPlan, plan_reshard
from hf_protocols.errors import BackendError, ReshardError
from hf_protocols.topology import Topology

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["HybridEngine", "Transition", "TransitionMemory"]


@dataclass(frozen=True, kw_only=True)
class Transition:
    """What one entry into generation did on this rank."""

    weight_version: int
    """Version of the weights that generation sees."""
    seconds: float
    """Wall time; 0 where nothing had to move."""
    recv_bytes: int
    """Bytes of weights received from other ranks."""
    is_unchanged: bool
    """The backend says that its weights changed, but this rank's bits are those of the last transition: an optimizer
    step with a gradient and a learning rate above zero that changed nothing points to a broken sync."""


@dataclass(frozen=True, kw_only=True)
class TransitionMemory:
    """What one rank holds while it generates, in bytes; known before anything moves."""

    generation_bytes: int
    """The generation shard."""
    training: Literal["moved", "kept"]
    """Whether the training shard lies inside the generation shard, or stays beside it."""
    training_bytes: int
    """Device bytes of the training shard beside the generation shard: 0 when it is moved."""
    host_bytes: int
    """Host copies of the parts of the training shard that lie outside the generation shard, when it is moved."""
    staging_bytes: int
    """Communication buffers, kept for the engine's lifetime."""


class HybridEngine:
    """Moves the weights of a training backend into a rollout backend on the same ranks (paper, section 5).

    Where both have one dtype the training shard is moved, not copied: during generation a rank holds its generation
    shard and nothing of the training shard beside it, afterwards the training weights are back, bit by bit, and the
    generation shard is freed. Training weights of another dtype (float32 masters of a bfloat16 model) stay.

    Example:
        with engine.generation():
            responses = engine.generate(prompts, SamplingParams(max_new_tokens=64))

    Args:
        train: the training backend.
        rollout: a rollout backend of the same model that exposes its weights.
        topology: the ranks of both.
        bucket_bytes: bound on the communication buffers.
        training_weights: `"move"` as above, the default where dtypes are equal; `"keep"` leaves both copies where they
            are, so that entering generation again without a change costs nothing.

    Raises:
        BackendError: if the rollout backend does not expose its weights, has another topology, or `"move"` is asked
            for between dtypes.
        ReshardError: if names or shapes of the two differ, or the rollout's tensors do not match its layout.
    """

    def __init__(
        self,
        train: TrainBackend,
        rollout: RolloutBackend,
        topology: Topology,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        training_weights: Literal["move", "keep"] | None = None,
    ) -> None:
        if not isinstance(rollout, SupportsWeightBuffers):
            raise BackendError(f"{type(rollout).__name__} does not expose its weights (weight_buffers)")
        source, target = train.weight_layout(), rollout.weight_layout()
        groups = topology.groups("micro_dp") if topology.generation else ()
        plan = plan_reshard(source, target, near=[groups, _machines(topology.world_size)])
        if plan.ranks != tuple(range(topology.world_size)):
            raise BackendError(
                f"the two backends are on the ranks {plan.ranks}, the topology has {topology.world_size}"
            )
        if training_weights == "move" and source.dtype != target.dtype:
            raise BackendError(
                f"training weights are {source.dtype}, generation weights {target.dtype}: the one cannot lie inside "
                'the other; use training_weights="keep"'
            )
        rank = dist.get_rank()
        check_weights(plan.target, rank, rollout.weight_buffers(), "generation")
        self._train = train
        self._rollout = rollout
        self._buffers: SupportsWeightBuffers = rollout
        self._plan = plan
        self._executor = ReshardExecutor(
            plan, group=_group_of(plan, topology, groups), bucket_bytes=bucket_bytes, device=local_device()
        )
        self._mover: ShardMover | None = None
        if training_weights == "move" or (training_weights is None and source.dtype == target.dtype):
            buffers = as_parts(rollout.weight_buffers())
            self._mover = ShardMover(plan, rank, as_parts(train.local_weights()), buffers)
            rollout.release()
        self._weight_version = rollout.weight_version
        self._weight_changes = train.weight_changes
        self._digest: int | None = None
        self._is_current = False
        self._is_generating = False
        self._last_transition: Transition | None = None

    @property
    def plan(self) -> ReshardPlan:
        """What every rank keeps, sends and receives in a transition."""
        return self._plan

    @property
    def memory(self) -> TransitionMemory:
        """What this rank holds while it generates."""
        rank = dist.get_rank()
        moved = self._mover is not None
        return TransitionMemory(
            generation_bytes=self._plan.target.held_bytes(rank),
            training="moved" if moved else "kept",
            training_bytes=0 if moved else self._plan.source.held_bytes(rank),
            host_bytes=self._mover.host_bytes if self._mover is not None else 0,
            staging_bytes=self._executor.buffer_bytes,
        )

    @property
    def weight_version(self) -> int:
        """Grows by one whenever generation sees weights that changed since it last ran."""
        return self._weight_version

    @property
    def last_transition(self) -> Transition | None:
        """The last entry into generation on this rank; None before the first."""
        return self._last_transition

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Brings the current training weights into the rollout backend. Collective over all ranks.

        Where the training weights are moved they cannot be used inside the block; they are back when it ends, however
        it ends. Where both are kept nothing moves if the training weights did not change since the last time.

        Raises:
            ReshardError: if a transfer fails; the training weights are intact.
            BackendError: inside another `generation()`.
        """
        if self._is_generating:
            raise BackendError("generation() was entered already: leave its block first")
        start = time.perf_counter()
        changed = self._train.weight_changes != self._weight_changes
        moves = self._mover is not None or not self._is_current or changed
        digest, received = self._digest, 0
        try:
            if moves:
                received = self._transfer()
            self._last_transition = Transition(
                weight_version=self._weight_version,
                seconds=time.perf_counter() - start if moves else 0.0,
                recv_bytes=received,
                is_unchanged=changed and digest is not None and digest == self._digest,
            )
            self._is_generating = True
            yield
        finally:
            self._is_generating = False
            if self._mover is not None:
                self._mover.restore()
                self._rollout.release()

    def generate(self, batch: TensorDict, sampling: SamplingParams) -> TensorDict:
        """Draws responses from the current weights; see `RolloutBackend.generate`.

        Raises:
            BackendError: outside `generation()`.
        """
        if not self._is_generating:
            raise BackendError("generate needs the current weights: call it inside `with engine.generation():`")
        return self._rollout.generate(batch, sampling)

    def close(self) -> None:
        """Frees both backends."""
        self._rollout.close()
        self._train.close()

    def _transfer(self) -> int:
        self._is_current = False
        changes = self._train.weight_changes
        version = self._weight_version + (changes != self._weight_changes)
        weights = self._train.local_weights()
        if changes != self._weight_changes or self._digest is None:
            self._digest = hash(tuple(compute_digest(part) for parts in as_parts(weights).values() for part in parts))
        transfer = self._executor.run(weights, self._buffers.weight_buffers(), version=version, mover=self._mover)
        wait_for_device()
        self._weight_version, self._weight_changes = version, changes
        self._rollout.commit_weights(version)
        self._is_current = True
        return transfer.recv_bytes


def _machines(world_size: int) -> Sequence[range]:
    """The ranks of every machine, as torchrun numbers them; one machine where nothing says how many ranks it has."""
    size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return [range(start, min(start + size, world_size)) for start in range(0, world_size, size)]


def _group_of(plan: ReshardPlan, topology: Topology, groups: Sequence[tuple[int, ...]]) -> dist.ProcessGroup | None:
    """The micro-DP group where all messages stay inside one (the paper's case), else all ranks."""
    group_of = {rank: group for group in groups for rank in group}
    if not groups or any(
        group_of[message.source] != group_of[rank] for message in plan.messages for rank in message.destinations
    ):
        return None
    try:
        return build_groups(topology, "micro_dp")
    except RuntimeError as error:
        raise ReshardError(f"the micro-DP groups {groups} could not be connected: {error}") from error
