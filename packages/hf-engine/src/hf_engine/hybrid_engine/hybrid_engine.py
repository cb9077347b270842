"""The colocated transition: one set of ranks trains and generates, the weights change their layout in between."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from hf_engine.agreement import HIGHEST, check_version, spread, together
from hf_engine.backends.base import RolloutBackend, SamplingParams, TrainBackend
from hf_engine.backends.capabilities import (
    SupportsAdapters,
    SupportsBufferLoading,
    SupportsBuffers,
    SupportsShardLoading,
    SupportsUnmergedAdapters,
    SupportsWeightBuffers,
)
from hf_engine.hybrid_engine.in_place_transition import InPlaceTransition
from hf_engine.hybrid_engine.sampler_check import SamplerCheck
from hf_engine.hybrid_engine.streamed_transition import StreamedTransition
from hf_engine.hybrid_engine.transitions import (
    CheckedWeights,
    Transition,
    TransitionMemory,
    WeightNeed,
    WeightTransition,
)
from hf_engine.process_groups import build_groups, find_machines, local_device
from hf_engine.resharding.execute import (
    DEFAULT_BUCKET_BYTES,
    Weights,
    as_parts,
    check_bucket_bytes,
    refuse_versions,
)
from hf_engine.resharding.plan import ReshardPlan, plan_reshard
from hf_engine.resharding.tensor_checks import check_weights, check_writable
from hf_protocols.errors import BackendError, ReshardError
from hf_protocols.foreign_code import Caught
from hf_protocols.topology import Topology
from hf_protocols.validation import Checks, show

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["HybridEngine"]

_TrainingWeights = Literal["move", "keep", "offload"]

_check = Checks(BackendError)

_HOLDERS: dict[int, int] = {}
"""By the id of a rollout backend, that of the engine whose weights it has: two engines may share one."""


class HybridEngine:
    """Moves the weights of a training backend into a rollout backend on the same ranks (paper, section 5).

    Where both have one dtype the training shard is moved, not copied. During generation a rank holds its generation
    shard alone. Afterwards the training weights are back, bit for bit, and the generation shard is freed. Training
    weights of another dtype (float32 masters of a bfloat16 model) stay in place. They also stay if the engine keeps its
    weights itself: it is then fed with the rank's shards, some at a time, with low-rank adapters separate or merged.

    Example:
        with engine.generation():
            responses = engine.generate(prompts, SamplingParams(max_new_tokens=64))

    Args:
        train: the training backend.
        rollout: a rollout backend of the same model that exposes its weights or loads shards.
        topology: the ranks of both.
        bucket_bytes: bound on the communication buffers, and on the shards that are on their way at once.
        training_weights: `"move"` as above, the default where dtypes are equal and the rollout backend exposes its
            weights; `"keep"` leaves both copies where they are, so that entering generation again without a change
            moves nothing; `"offload"` keeps them on the host during generation, the optimizer's state with them.
        verify_transfers: every message of weights carries a digest, and bytes that differ are an error on all ranks.
            Costs a pass over what is sent and received, and an agreement.

    Raises:
        BackendError: if the rollout backend neither exposes its weights nor loads shards, or has another topology; or
            if `"move"` is requested between dtypes or with an engine that keeps its weights itself.
        ReshardError: if names or shapes of the two differ, or the rollout's tensors do not match its layout.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        train: TrainBackend,
        rollout: RolloutBackend,
        topology: Topology,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        training_weights: Literal["move", "keep", "offload"] | None = None,
        verify_transfers: bool = False,
    ) -> None:
        training_weights = _pair_adapters(train, rollout, training_weights)
        plan = _agree_on_plan(train, rollout, topology, training_weights, bucket_bytes, verify_transfers)
        apart = rollout.held_adapters() if isinstance(rollout, SupportsUnmergedAdapters) else None
        self._merges = isinstance(train, SupportsAdapters) and apart is None
        self._train, self._rollout, self._plan = train, rollout, plan
        self._proof: SamplerCheck | None = None
        self._is_closed = self._is_current = self._is_generating = False
        self._group = _build_transfer_group(plan, topology)
        with ExitStack() as undo:
            undo.callback(self._end_group)
            options: dict[str, Any] = {
                "group": self._group,
                "bucket_bytes": bucket_bytes,
                "verify_transfers": verify_transfers,
            }
            self._way: WeightTransition
            if isinstance(rollout, SupportsWeightBuffers):
                self._way = InPlaceTransition(train, rollout, plan, training_weights=training_weights, **options)
            elif isinstance(rollout, SupportsShardLoading):  # others were refused with the plan
                self._way = StreamedTransition(train, rollout, plan, offloads=training_weights == "offload", **options)
                self._proof = SamplerCheck(train, topology, (plan.source.dtype, plan.target.dtype))
            undo.pop_all()
        self._held = _Held(rollout.weight_version, train.weight_changes)
        self._last_transition: Transition | None = None

    @property
    def plan(self) -> ReshardPlan:
        """Plan of a transition: the weights that every rank keeps, sends and receives."""
        return self._plan

    @property
    def memory(self) -> TransitionMemory:
        """Memory that this rank holds while it generates."""
        self._check_open("memory")
        return self._way.measure()

    @property
    def weight_version(self) -> int:
        """Grows by one whenever generation sees weights that changed since it last ran.

        It may be set to a saved one, above its own, which the next samples then carry.

        Raises:
            BackendError: when set to what is not a version.
        """
        return self._held.version

    @weight_version.setter
    def weight_version(self, version: int) -> None:
        check_version(version, BackendError)
        if version > self._held.version:
            self._held = self._held._replace(version=version)
            self._is_current = False  # an engine that keeps its weights has them under the old version

    @property
    def last_transition(self) -> Transition | None:
        """The last entry into generation on this rank; None before the first."""
        return self._last_transition

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Brings the current training weights into the rollout backend. Collective over all ranks, as is its end.

        Where the training weights are moved or offloaded, the training backend refuses what needs them inside the
        block. They are back when it ends. Where both are kept, nothing moves if the training weights did not change.

        No digest can check an engine that keeps its weights itself, so its samples are checked. The training backend
        scores some of them again when the first block that generated ends, and when the first one after a change of the
        weights ends.

        Raises:
            ReshardError: on all ranks, if the weights changed on some ranks only, tensors do not match, bytes differ
                from those that were sent (`verify_transfers`), or samples are not those of the training weights. The
                training weights are intact then. On one rank alone, if it receives another message than it should.
            BackendError: inside another `generation()`.
        """
        self._check_open("generation()")
        if self._is_generating:
            raise BackendError("generation() was entered already. Leave its block first")
        if self._proof is not None:
            self._proof.begin()
        self._enter()
        with ExitStack() as leaving:
            leaving.push(self._leave_after)
            yield
        if self._proof is not None:
            self._proof.check()

    @torch.inference_mode(False)  # what the first entry allocates is written by later ones, outside of that mode
    def _enter(self) -> None:
        """Moves the weights. Where that fails on all ranks, the next entry sends them again, under the same version."""
        start = time.perf_counter()
        held, changes = self._held, self._train.weight_changes
        has_changed = changes != held.changes
        version = held.version + has_changed
        is_own = _HOLDERS.pop(id(self._rollout), None) == id(self)
        if not is_own:
            self._way.forget()
        is_current = is_own and self._is_current and not has_changed
        checked, need = self._agree(version, self._way.find_need(is_stale=not is_current))
        with ExitStack() as undo:
            undo.push(self._leave_after)
            self._is_current = False
            moved = self._way.enter(version, checked, need)
            undo.pop_all()
        self._last_transition = Transition(
            weight_version=version,
            seconds=time.perf_counter() - start if need else 0.0,
            recv_bytes=moved.recv_bytes,
            fed_bytes=moved.fed_bytes,
        )
        self._held = _Held(version, changes)
        _HOLDERS[id(self._rollout)] = id(self)
        self._is_current = self._is_generating = True

    def _agree(self, version: int, need: WeightNeed) -> tuple[CheckedWeights | None, WeightNeed]:
        """This rank's weights, checked, and the most that any rank needs.

        The one agreement of an entry; merged adapters need another one before, because reading them is collective.
        """
        read: Callable[[], Weights] = self._train.local_weights
        if self._way.is_silent:
            return self._way.check(read()), need
        if self._merges:
            _, need = self._agree_once(version, need, None)
            if need == WeightNeed.NONE:
                return None, need
            weights = read()
            return self._agree_once(version, need, lambda: weights)
        return self._agree_once(version, need, read)

    def _agree_once(
        self, version: int, need: WeightNeed, read: Callable[[], Weights] | None
    ) -> tuple[CheckedWeights | None, WeightNeed]:
        """The weights that `read` returns, checked if this rank has to move some, and the most that any rank needs.

        Collective over all ranks.

        Raises:
            ReshardError: on every rank, if any refused its weights, if they changed on some ranks only, or for
                different versions.
        """
        checked = None
        with together("no weights were moved", error=ReshardError) as agreement:
            check_version(version, ReshardError)
            agreement.number = version
            agreement.lowest = agreement.highest = need
            if need and read is not None:
                checked = self._way.check(read())
        if agreement.lowest == WeightNeed.NONE < agreement.highest:
            raise ReshardError(
                "the training weights of some ranks changed since the last transition, those of rank "
                f"{dist.get_rank()} {'did' if need else 'did not'}. Call train_step and what loads weights, and set "
                "weight_version, on all ranks alike"
            )
        if need and not agreement.is_alike:
            refuse_versions(version, None, range(dist.get_world_size()))
        return checked, WeightNeed(agreement.highest)

    @torch.inference_mode(False)
    def _leave_after(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Leaves a block; an error of the block is never replaced by an error of moving the weights back."""
        self._is_generating = False
        if error is None:
            self._way.leave(failed=False)
            return
        with Caught() as caught:  # an engine that is gone may raise anything
            self._way.leave(failed=True)
        if caught.error is not None:
            error.add_note(f"the way back to training failed too: {type(caught.error).__name__}: {caught.error}")

    def generate(self, batch: TensorDict, sampling: SamplingParams) -> TensorDict:
        """Draws responses from the current weights; see `RolloutBackend.generate`.

        Raises:
            BackendError: outside `generation()`.
        """
        self._check_open("generate")
        if not self._is_generating:
            raise BackendError("generate needs the current weights. Call it inside `with engine.generation():`")
        responses = self._rollout.generate(batch, sampling)
        if self._proof is not None:
            self._proof.note(batch, responses, sampling)
        return responses

    def sum_over_ranks(self, value: float) -> float:
        """Adds a number over all ranks of the topology; every rank gets the sum. Collective.

        Raises:
            BackendError: on every rank, if any gave something else than a number.
        """
        is_number = isinstance(value, int | float)
        summed = torch.tensor([float(value), 0] if is_number else [0, 1], dtype=torch.float64, device=local_device())
        dist.all_reduce(summed)
        if summed[1]:
            given = show(value) if not is_number else "a number here, and something else on other ranks"
            raise BackendError(f"sum_over_ranks: value={given}. Use a number on every rank")
        return float(summed[0])

    def close(self) -> None:
        """Frees both backends and the groups that this engine made; not inside `generation()`."""
        if self._is_generating:
            raise BackendError("close() inside generation(). Leave its block first")
        if self._is_closed:
            return
        self._is_closed = True
        _HOLDERS.pop(id(self._rollout), None)
        del self._way  # it holds communication buffers and the group, whose threads end with what refers to it
        with ExitStack() as each:  # in the reverse order, even if one of them raises
            each.callback(self._end_group)
            each.callback(self._train.close)
            each.callback(self._rollout.close)

    def _end_group(self) -> None:
        group, self._group = self._group, None
        if group not in (None, dist.group.WORLD):
            dist.destroy_process_group(group)

    def _check_open(self, method: str) -> None:
        if self._is_closed:
            raise BackendError(f"{method}: this HybridEngine was closed, and its backends with it. Build others")


class _Held(NamedTuple):
    """Weights that generation had last: their version, and the changes that the training backend counted then."""

    version: int
    changes: int


def _pair_adapters(
    train: TrainBackend, rollout: RolloutBackend, training_weights: _TrainingWeights | None
) -> _TrainingWeights | None:
    """Has a training backend with adapters show them as the rollout backend takes them: apart, or merged.

    Returns:
        `training_weights`; merged weights are copies, and the training weights stay: `"keep"` by default.

    Raises:
        BackendError: for merged weights that were to be moved, or a rollout backend with other adapters.
    """
    wanted = rollout.held_adapters() if isinstance(rollout, SupportsUnmergedAdapters) else None
    own = train.lora if isinstance(train, SupportsAdapters) else None
    if wanted is not None and (own is None or (own.rank, own.scaling) != (wanted.rank, wanted.scaling)):
        raise BackendError(f"the rollout backend has {wanted}, the training backend {own}. Build both with one lora")
    if not isinstance(train, SupportsAdapters):
        return training_weights
    train.keep_adapters_apart(wanted is not None)
    if wanted is None and training_weights == "move":
        raise BackendError(
            'training_weights="move": merged adapters are copies, which the training weights cannot lie in. Use "keep" '
            'or "offload"'
        )
    return training_weights or (None if wanted is not None else "keep")


def _agree_on_plan(
    train: TrainBackend,
    rollout: RolloutBackend,
    topology: Topology,
    training_weights: str | None,
    bucket_bytes: int,
    verify_transfers: bool,
) -> ReshardPlan:
    """The plan between two backends that fit each other; where they do not on one rank, an error on all."""
    machines = find_machines()
    with together("no plan was made") as agreement:
        _check.kind("verify_transfers", verify_transfers, bool, "True or False")
        agreement.number = zlib.crc32(repr((training_weights, bucket_bytes, verify_transfers)).encode())
        plan = _plan_between(train, rollout, topology, training_weights, machines)
        check_bucket_bytes(bucket_bytes, plan.target)
    if not agreement.is_alike:
        raise BackendError(
            f"the ranks were given different training_weights, bucket_bytes or verify_transfers; this one has "
            f"{show(training_weights)}, {bucket_bytes} and {verify_transfers}. Give all ranks the same"
        )
    ((lowest, highest),) = spread([(plan.digest % HIGHEST, plan.digest % HIGHEST)], None, local_device())
    if lowest != highest:
        raise BackendError(
            "the ranks have different plans. Build their backends with the same model, topology and dtype"
        )
    return plan


def _plan_between(
    train: TrainBackend,
    rollout: RolloutBackend,
    topology: Topology,
    training_weights: str | None,
    machines: Sequence[Sequence[int]],
) -> ReshardPlan:
    if not callable(getattr(train, "local_weights", None)):
        raise BackendError(f"train={show(train)}. Use a training backend")
    if not callable(getattr(rollout, "weight_layout", None)):
        raise BackendError(f"rollout={show(rollout)}. Use a rollout backend")
    _check.kind("topology", topology, Topology, "a Topology")
    if not isinstance(rollout, SupportsWeightBuffers | SupportsShardLoading):
        raise BackendError(
            f"{type(rollout).__name__} neither exposes its weights (weight_buffers) nor loads shards (load_shards)"
        )
    if training_weights not in (None, "move", "keep", "offload"):
        raise BackendError(f'training_weights={show(training_weights)}. Use "move", "keep", "offload" or None')
    source, target = train.weight_layout(), rollout.weight_layout()
    plan = plan_reshard(source, target, near=[_micro_dp(topology), machines])
    if plan.ranks != tuple(range(topology.world_size)):
        raise BackendError(f"the two backends are on the ranks {plan.ranks}, the topology has {topology.world_size}")
    if training_weights == "move" and source.dtype != target.dtype:
        raise BackendError(
            f"training weights are {source.dtype}, generation weights {target.dtype}: the one cannot lie inside "
            'the other. Use training_weights="keep" or "offload"'
        )
    if training_weights == "move" and not isinstance(rollout, SupportsWeightBuffers):
        raise BackendError(
            f"{type(rollout).__name__} keeps its weights itself: the training weights cannot lie inside them. Use "
            'training_weights="keep" or "offload"'
        )
    _check_buffers(train, rollout)
    if isinstance(rollout, SupportsWeightBuffers):
        check_weights(target, dist.get_rank(), rollout.weight_buffers(), "generation")
        check_writable(as_parts(rollout.weight_buffers()), "the generation tensors, maybe another HybridEngine's,")
    return plan


def _check_buffers(train: TrainBackend, rollout: RolloutBackend) -> None:
    if isinstance(rollout, SupportsBufferLoading):
        return  # its engine says which tensors it lacks, and which it has no place for
    has = [backend.buffers() if isinstance(backend, SupportsBuffers) else {} for backend in (train, rollout)]
    shapes = [{name: tuple(buffer.shape) for name, buffer in buffers.items()} for buffers in has]
    if differing := sorted(name for name in {*shapes[0], *shapes[1]} if shapes[0].get(name) != shapes[1].get(name)):
        raise ReshardError(
            f"the two backends hold other buffers, such as {show(differing[0])}. Build both with the same model, and "
            "with backends that hold its buffers, such as fsdp and transformers"
        )


def _micro_dp(topology: Topology) -> Sequence[tuple[int, ...]]:
    return topology.groups("micro_dp") if topology.generation else ()


def _build_transfer_group(plan: ReshardPlan, topology: Topology) -> dist.ProcessGroup | None:
    """The micro-DP group where all messages stay inside one (the paper's case), else all ranks."""
    groups = _micro_dp(topology)
    group_of = {rank: group for group in groups for rank in group}
    if not groups or any(
        group_of[message.source] != group_of[rank] for message in plan.messages for rank in message.destinations
    ):
        return None
    try:
        return build_groups(topology, "micro_dp")
    except RuntimeError as error:
        raise ReshardError(f"the micro-DP groups {groups} could not be connected: {error}") from error
