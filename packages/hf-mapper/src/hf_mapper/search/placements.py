"""Sets of models that share a pool (set partitions), and the devices of each pool (`pack`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hf_mapper.specs import ClusterSpec, MachineSpec

__all__ = ["PoolRequest", "Slots", "fits", "pack", "set_partitions"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PoolRequest:
    """`num_gpus` devices of the machines `cluster.machines[machine]`."""

    machine: int
    num_gpus: int


@dataclass(frozen=True, kw_only=True)
class Slots:
    """`slots` devices of machine number `index` among those of `cluster.machines[machine]`."""

    machine: int
    index: int
    slots: int


def set_partitions(items: Sequence[T]) -> Iterator[tuple[tuple[T, ...], ...]]:
    """Returns every way to split `items` into non-empty sets, fewest sets first: Bell(n) of them (15 for four models).

    Sets keep the order of `items`, and stand in order of their first item.
    """
    yield from sorted(_split(tuple(items)), key=len)


def pack(cluster: ClusterSpec, requests: Sequence[PoolRequest]) -> tuple[tuple[Slots, ...], ...] | None:
    """Returns the machines of each request, or None if they do not fit together.

    A pool takes whole machines first and the rest of it in one more machine, so that tensor-parallel groups of a size
    that divides both stay inside a machine. Whole machines go in order of the requests; then the rests, largest first,
    into the first machine with room, trying the next ones where that leaves no room for the others. Exact: None means
    that no such assignment exists, and a smaller request never fails where a larger one fitted.
    """
    placed: list[tuple[Slots, ...]] = [()] * len(requests)
    for kind, machine in enumerate(cluster.machines):
        chosen = [number for number, request in enumerate(requests) if request.machine == kind]
        rests = _place_rests(machine, [requests[number].num_gpus for number in chosen])
        if rests is None:
            return None
        used = 0
        for number, rest in zip(chosen, rests, strict=True):
            whole, left = divmod(requests[number].num_gpus, machine.num_gpus)
            slots = [Slots(machine=kind, index=used + index, slots=machine.num_gpus) for index in range(whole)]
            used += whole
            placed[number] = (*slots, *([Slots(machine=kind, index=rest, slots=left)] if left else ()))
    return tuple(placed)


def fits(cluster: ClusterSpec, requests: Sequence[PoolRequest]) -> bool:
    """True if `pack` finds a place for the requests."""
    return all(
        _place_rests(machine, [request.num_gpus for request in requests if request.machine == kind]) is not None
        for kind, machine in enumerate(cluster.machines)
    )


def _place_rests(machine: MachineSpec, counts: Sequence[int]) -> list[int] | None:
    """The machine that holds what each of `counts` needs beyond whole machines (any, where that is nothing)."""
    used = sum(count // machine.num_gpus for count in counts)
    order = sorted(range(len(counts)), key=lambda number: -(counts[number] % machine.num_gpus))
    sizes = [counts[number] % machine.num_gpus for number in order]
    sizes = [size for size in sizes if size]
    if used > machine.num_machines:
        return None
    bins = _fill(sizes, [machine.num_gpus] * min(machine.num_machines - used, len(sizes)))
    if bins is None:
        return None
    found = dict(zip(order, bins, strict=False))
    return [used + found.get(number, 0) for number in range(len(counts))]


def _split(items: tuple[T, ...]) -> Iterator[tuple[tuple[T, ...], ...]]:
    if not items:
        yield ()
        return
    *front, last = items
    for partition in _split(tuple(front)):
        for number, members in enumerate(partition):
            yield (*partition[:number], (*members, last), *partition[number + 1 :])
        yield (*partition, (last,))


def _fill(sizes: list[int], room: list[int]) -> list[int] | None:
    """A bin for each size, first fit with backtracking."""
    if not sizes:
        return []
    for index, free in enumerate(room):
        if free >= sizes[0]:
            rest = _fill(sizes[1:], [*room[:index], free - sizes[0], *room[index + 1 :]])
            if rest is not None:
                return [index, *rest]
    return None
