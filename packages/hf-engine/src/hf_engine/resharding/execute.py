"""Running a reshard plan on tensors: the only collectives that move weights."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hf_engine.agreement import Agreement, check_version, spread, together
from hf_engine.resharding.layouts import WeightLayout
from hf_engine.resharding.members import choose_device, find_members
from hf_engine.resharding.moving import ShardMover
from hf_engine.resharding.plan import ReshardPlan
from hf_engine.resharding.rounds import compute_rounds
from hf_engine.resharding.steps import CHECKSUM_BYTES, Checksums, RegionViews, Step, build_step, locate
from hf_engine.resharding.tensor_checks import check_readable, check_weights, check_writable
from hf_protocols.errors import ReshardError
from hf_protocols.validation import Checks

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "Buffers",
    "Parts",
    "ReshardExecutor",
    "Transfer",
    "Weights",
    "as_parts",
    "check_bucket_bytes",
    "execute_reshard",
    "note_version",
    "refuse_versions",
    "require_one_version",
]

_check = Checks(ReshardError)

DEFAULT_BUCKET_BYTES = 64 << 20
"""Bound on the bytes of a rank's communication buffers."""

Weights = Mapping[str, torch.Tensor | Sequence[torch.Tensor]]
"""A rank's tensors by Hugging Face name: one tensor per box of its layout, a bare tensor where there is one box."""

Parts = dict[str, list[torch.Tensor]]
"""The same with a list for every name."""

Buffers = list[list[torch.Tensor]]
"""Communication buffers: for each of two rounds in flight one that goes out and one that comes in."""

_UNKNOWN = -1
"""In the place of a version: no rank named one."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Weights that one run moved to this rank."""

    recv_bytes: int
    """Bytes of weights received from other ranks: the plan's figure."""
    checksum_bytes: int
    """Bytes of checksums that came with them."""
    version: int | None
    """Version of the weights, also on ranks that received nothing; None if no rank named a version."""


class ReshardExecutor:
    """Runs one plan again and again: rounds are computed once, buffers are allocated once.

    While one round is on its way the one before is copied into place. Every message says what it is a copy of, and of
    which version of the weights.

    Args:
        plan: from `plan_reshard`; the same on every rank.
        group: the process group that connects the plan's ranks; None is the default group. Plan ranks are
            torch.distributed's global ranks of the group unless `ranks` says otherwise.
        ranks: plan rank of every group rank, in group order.
        bucket_bytes: bound on the bytes of the communication buffers, beyond one element for every peer and its
            checksum.
        device: where the communication buffers live; None: where the group communicates, see `local_device`. The
            tensors themselves may live elsewhere.
        buffers: taken from executors that never run at the same time, and enlarged where they are too small.
        verify_transfers: every message carries a digest of its bytes. Where one differs from what arrived, all ranks
            refuse the weights. Costs a pass over what is sent and received, and an agreement at the end.

    Raises:
        ReshardError: if this rank is not in the group, or would exchange bytes with a rank outside of it, or for
            another argument that cannot be. Other ranks do not learn of it.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        *,
        group: dist.ProcessGroup | None = None,
        ranks: Sequence[int] | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        device: torch.device | str | None = None,
        buffers: Buffers | None = None,
        verify_transfers: bool = False,
    ) -> None:
        _check.kind("plan", plan, ReshardPlan, "a ReshardPlan, of plan_reshard(source, target)")
        item_bytes = plan.target.element_bytes
        check_bucket_bytes(bucket_bytes, plan.target)
        _check.kind("verify_transfers", verify_transfers, bool, "True or False")
        self._plan = plan
        self._verifies = verify_transfers
        self._group = group
        self._members, self._rank = find_members(group, ranks)
        device = choose_device(device, group)
        self._check_peers()
        # Two rounds are in flight at once, each with an outgoing and an incoming buffer.
        rounds = compute_rounds(plan, self._members, bucket_bytes // (4 * item_bytes))
        held, wanted = plan.source.boxes_of(self._rank), plan.target.boxes_of(self._rank)
        self._steps = [build_step(round_, self._members, self._rank, held, wanted, item_bytes) for round_ in rounds]
        self._kept = [
            (locate(wanted, name, box), locate(held, name, box)) for name, box in plan.kept.get(self._rank, ())
        ]
        self._first, self._last = self._spans_of_names()
        self._dtype = getattr(torch, plan.target.dtype)
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._fingerprint = zlib.crc32(repr((bucket_bytes, verify_transfers)).encode(), plan.digest)
        self._is_agreed = False
        sizes = [max((getattr(s, f"{way}_bytes") for s in self._steps), default=0) for way in ("send", "recv")]
        self._buffers = [] if buffers is None else buffers
        _enlarge(self._buffers, min(2, len(self._steps)), sizes, device)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the communication buffers, kept from step to step."""
        return sum(buffer.nbytes for slot in self._buffers for buffer in slot)

    def peak_bytes(self, mover: ShardMover) -> int:
        """The most bytes of training and generation weights that are live at once where `mover` moves them."""
        alone = [([name], [name]) for name in self._first[-1]]
        return mover.peak_bytes([*alone, *zip(self._first[:-1], self._last[:-1], strict=True)])

    @torch.no_grad()
    def run(
        self,
        source: Weights,
        target: Weights,
        *,
        version: int | None = None,
        mover: ShardMover | None = None,
    ) -> Transfer:
        """Fills this rank's target tensors from the source tensors of all ranks. Collective over the group.

        Args:
            source: this rank's tensors in the source layout; read only, unless a mover empties them.
            target: this rank's tensors in the target layout; written in place, cast where dtypes differ.
            version: of the source's weights, at least 0 and below 2^31 - 1, the same on all ranks that know it. None,
                for a rank that only receives, takes the others'.
            mover: moves this rank's training shard into the target instead of copying it; built on these tensors.

        Raises:
            ReshardError: on every rank, before anything moves: for an invalid version, different ones, or tensors that
                do not match the layout. Afterwards as `exchange`.
        """

        def check() -> tuple[Parts, Parts]:
            parts = self.check(source, target, are_filled=mover is None)
            if mover is not None and not mover.is_built_on(*parts):
                raise ReshardError(f"the mover of rank {self._rank} was built on other tensors. Build one on these")
            return parts

        parts, version = self._agree(version, check)
        return self.exchange(*parts, version=version, mover=mover)

    def check(self, source: Weights, target: Weights, *, are_filled: bool = True) -> tuple[Parts, Parts]:
        """Returns this rank's tensors as `exchange` takes them. Not collective.

        Args:
            source: see `run`.
            target: see `run`.
            are_filled: target tensors have their memory already.

        Raises:
            ReshardError: for tensors that do not match the layouts, or that cannot be used.
        """
        check_weights(self._plan.source, self._rank, source, "source")
        check_weights(self._plan.target, self._rank, target, "target")
        sources, targets = as_parts(source), as_parts(target)
        check_readable(sources, f"the source tensors of rank {self._rank}")
        check_writable(targets, f"the target tensors of rank {self._rank}", are_filled=are_filled)
        return sources, targets

    @torch.no_grad()
    def exchange(
        self, sources: Parts, targets: Parts, *, version: int | None, mover: ShardMover | None = None
    ) -> Transfer:
        """Fills the target tensors as `run` does, where all ranks agreed already to do so and on the version.

        Args:
            sources: of `check`.
            targets: of `check`.
            version: of the weights, the same on all ranks.
            mover: see `run`.

        Raises:
            ReshardError: on the rank that received another message than it should, while the others return. With
                `verify_transfers` on every rank, and for bytes that differ from those that were sent, too.
        """
        checksums = Checksums(_UNKNOWN if version is None else version, verifies=self._verifies)
        if mover is None:
            held, wanted = RegionViews(sources), RegionViews(targets)
        else:
            held, wanted = mover.held, mover.wanted
        self._exchange(held, wanted, checksums, mover)
        if self._steps:
            self._refuse_damage([self._members[peer] for peer in checksums.damaged()])
        return Transfer(
            recv_bytes=sum(step.payload_bytes for step in self._steps),
            checksum_bytes=checksums.count * CHECKSUM_BYTES,
            version=version,
        )

    def _agree(
        self, version: int | None, check: Callable[[], tuple[Parts, Parts]]
    ) -> tuple[tuple[Parts, Parts], int | None]:
        """This rank's tensors, which either all ranks of the group checked or none, and the version of all. Collective.

        Once all ranks know that they have the same plan, and if this plan moves no weights, no rank waits for another.

        Raises:
            ReshardError: naming the ranks that refused, and why. And on all for executors of different plans or
                options, or different versions.
        """
        if self._is_agreed and not self._steps:
            if version is not None:
                check_version(version, ReshardError)
            return check(), version
        options: dict[str, Any] = {"error": ReshardError, "device": self._device, "ranks": self._members}
        with together("no weights were moved", self._group, **options) as agreement:
            agreement.number = self._fingerprint
            note_version(agreement, version)
            parts = check()
        if not agreement.is_alike:
            raise ReshardError(
                f"the ranks were given different plans, bucket_bytes or verify_transfers; rank {self._rank} has "
                f"bucket_bytes={self._bucket_bytes} and {len(self._steps)} rounds. Give all the same"
            )
        self._is_agreed = True
        return parts, require_one_version(agreement, version, self._group, self._members)

    def _exchange(self, held: RegionViews, wanted: RegionViews, checksums: Checksums, mover: ShardMover | None) -> None:
        """Runs the steps, one of them ahead: what arrived is copied while the next round is on its way."""
        pending: tuple[Step, torch.Tensor, list[dist.Work]] | None = None
        if mover is None:
            for destination, origin in self._kept:
                wanted.at(destination).copy_(held.at(origin))
        else:
            mover.lend(self._first[-1])  # all at once: a call for each takes time
            # These come first, while the generation shard is incomplete and there is room for a parameter twice.
            for name in self._first[-1]:
                mover.prepare([name])
                mover.empty([name])
        for index, step in enumerate(self._steps):
            outgoing, incoming = self._buffers[index % 2]
            if mover is not None:
                mover.prepare(self._first[index])
            step.pack(held, outgoing, self._dtype, checksums)
            if mover is not None:
                mover.empty(self._last[index])
            works = step.start(outgoing, incoming, self._group)
            if pending is not None:
                self._finish(pending, wanted, checksums)
            pending = (step, incoming, works)
        if pending is not None:
            self._finish(pending, wanted, checksums)

    def _finish(
        self, pending: tuple[Step, torch.Tensor, list[dist.Work]], wanted: RegionViews, checksums: Checksums
    ) -> None:
        step, incoming, works = pending
        for work in works:
            work.wait()
        step.unpack(incoming, wanted, self._dtype, checksums)

    def _spans_of_names(self) -> tuple[list[list[str]], list[list[str]]]:
        """By step: parameters that are needed from it on, and those whose source is not needed after it.

        One entry more than steps: the parameters that no step of this rank touches.
        """
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for index, step in enumerate(self._steps):
            for name in step.packed_names | step.unpacked_names:
                first.setdefault(name, index)
                last[name] = index
        names = dict.fromkeys([*self._plan.source.boxes_of(self._rank), *self._plan.target.boxes_of(self._rank)])
        steps = range(len(self._steps) + 1)
        return (
            [[name for name in names if first.get(name, steps[-1]) == index] for index in steps],
            [[name for name in names if last.get(name, steps[-1]) == index] for index in steps],
        )

    def _refuse_damage(self, ranks: Sequence[int]) -> None:
        """Refuses what came from these ranks; with `verify_transfers` on all ranks, so that none goes on alone."""
        highest = len(ranks)
        if self._verifies:
            ((_, highest),) = spread([(0, highest)], self._group, self._device)
        if ranks:
            raise ReshardError(
                f"rank {self._rank} received something else than the ranks {list(ranks)} sent: the checksums differ; "
                "the weights are not complete"
            )
        if highest:
            raise ReshardError(f"another rank refused what it received; rank {self._rank} received what was sent")

    def _check_peers(self) -> None:
        reached = {
            rank
            for m in self._plan.messages
            if self._rank in m.participants
            for rank in ({m.source} if m.source != self._rank else m.destinations)
        }
        if outside := sorted(reached - set(self._members)):
            raise ReshardError(
                f"rank {self._rank} exchanges weights with ranks {outside}, which are not in its group "
                f"{self._members}. Run the plan over a group that holds all of them"
            )


def execute_reshard(
    plan: ReshardPlan,
    source: Weights,
    target: Weights,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> int:
    """Runs a plan once; returns the bytes of weights that this rank received. See `ReshardExecutor` to run it often.

    Args:
        plan: from `plan_reshard`; the same on every rank.
        source: this rank's tensors in the source layout.
        target: this rank's tensors in the target layout; on the host or on `device`.
        group: as in `ReshardExecutor`, whose usual bound on the communication buffers holds.
        device: as in `ReshardExecutor`; a rank that holds no tensor takes part there, too.

    Raises:
        ReshardError: as `ReshardExecutor` and its `run`, on every rank of the group.
    """
    find_members(group, None)
    with together("the plan was not run", group, error=ReshardError):
        executor = ReshardExecutor(plan, group=group, device=device)
    return executor.run(source, target).recv_bytes


def check_bucket_bytes(bucket_bytes: int, layout: WeightLayout) -> None:
    """Refuses buckets that do not hold an element for each of two rounds in flight, out and in."""
    _check.count("bucket_bytes", bucket_bytes)
    if bucket_bytes < 4 * layout.element_bytes:
        raise ReshardError(f"bucket_bytes={bucket_bytes} does not hold four {layout.dtype} elements")


def note_version(agreement: Agreement, version: int | None) -> None:
    """Takes this rank's version of the weights into an agreement; None: another rank names it.

    Raises:
        ReshardError: for what is not a version.
    """
    if version is not None:
        check_version(version, ReshardError)
        agreement.lowest = agreement.highest = version


def require_one_version(
    agreement: Agreement, version: int | None, group: dist.ProcessGroup | None, ranks: Sequence[int]
) -> int | None:
    """The version that an agreement found; None if no rank named one. Collective where they differ.

    Args:
        agreement: with `note_version` in its block.
        version: that this rank named.
        group: of the agreement.
        ranks: names of its ranks.

    Raises:
        ReshardError: on every rank, if they named different ones.
    """
    if agreement.lowest < agreement.highest:
        refuse_versions(version, group, ranks)
    return agreement.highest if agreement.highest >= 0 else None


def refuse_versions(version: int | None, group: dist.ProcessGroup | None, ranks: Sequence[int]) -> NoReturn:
    """Says which ranks have which version, on all ranks that know that they differ. Collective.

    Raises:
        ReshardError: always.
    """
    versions: list[int | None] = [None] * len(ranks)
    dist.all_gather_object(versions, version, group=group)
    by_version: dict[int, list[int]] = {}
    for rank, each in zip(ranks, versions, strict=True):
        if each is not None:
            by_version.setdefault(each, []).append(rank)
    named = [
        f"{each} on rank {first}" + (f" and {len(more)} more" if more else "")
        for each, (first, *more) in sorted(by_version.items())
    ]
    raise ReshardError(
        f"the ranks named different versions of the weights: {', '.join(named)}; no weights were moved. Change the "
        "weights as often on all ranks, and expect the version that is sent"
    )


def as_parts(weights: Weights) -> Parts:
    """The same tensors with every name's in a list."""
    return {name: _as_list(tensors) for name, tensors in weights.items()}


@torch.inference_mode(False)  # buffers are written again outside of that mode
def _enlarge(buffers: Buffers, num_slots: int, sizes: Sequence[int], device: torch.device | str) -> None:
    while len(buffers) < num_slots:
        buffers.append([torch.empty(0, dtype=torch.uint8, device=device) for _ in sizes])
    for slot in buffers[:num_slots]:
        for way, size in enumerate(sizes):
            if slot[way].nbytes < size:
                slot[way] = torch.empty(size, dtype=torch.uint8, device=device)


def _as_list(tensors: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
