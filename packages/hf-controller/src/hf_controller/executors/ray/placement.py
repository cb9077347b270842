"""Slots of pools as Ray placement groups: one per machine, one bundle per slot."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hf_controller.groups.resource_pool import ResourcePool
from hf_protocols import PoolError
from hf_protocols.validation import show

__all__ = ["PlacedPool", "place"]

_SLOT_SHARE = 0.05
"""Part of a slot that one process takes, so that several actor groups fit on it."""

_FIRST_SLICE_S = 0.002
"""Before the second look at a placement group. Where slots are free, it has them after a few milliseconds."""
_LONGEST_SLICE_S = 0.05
"""Between two looks of a long wait."""
_NODE_LABEL = "ray.io/node-id"  # Ray gives it to every node


class PlacedPool:
    """A pool that has its slots.

    Args:
        pool: the pool.
        groups: a placement group for each machine, ready.

    Attributes:
        nodes: the machines' ids.
        on_one_machine: whether all slots are on one machine.
    """

    def __init__(self, pool: ResourcePool, groups: Sequence[PlacementGroup]) -> None:
        self.pool = pool
        self._groups = list(groups)
        tables = [placement_group_table(group) for group in groups]
        self.nodes = {node for table in tables for node in table["bundles_to_node_id"].values()}
        self.on_one_machine = len(self.nodes) == 1

    def options(self, rank: int) -> dict[str, Any]:
        """Returns the actor options that place an actor of `rank`."""
        machine = self.pool.machines[rank]
        slot = rank - sum(self.pool.slots[:machine])
        strategy = PlacementGroupSchedulingStrategy(self._groups[machine], placement_group_bundle_index=slot)
        share = {"num_cpus": _SLOT_SHARE, "num_gpus": _SLOT_SHARE if self.pool.device == "cuda" else 0}
        return {**share, "scheduling_strategy": strategy}

    def remove(self) -> None:
        """Gives the slots back."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups.clear()


def place(
    pool: ResourcePool, timeout_s: float, *, own: Sequence[ResourcePool] = (), on_distinct_machines: bool = False
) -> PlacedPool:
    """Reserves the slots of `pool`.

    Args:
        pool: the pool.
        timeout_s: deadline.
        own: pools that this program holds.
        on_distinct_machines: refuse to put two of the pool's machines on one of the cluster's, where there is room.

    Raises:
        PoolError: if the cluster does not have them free in time; it says what is free and what was asked. At once
            where no waiting would help.
    """
    unit = {"CPU": 1.0, "GPU": 1.0} if pool.device == "cuda" else {"CPU": 1.0}
    if not _could_ever_fit(pool, unit, own):
        names = ", ".join(repr(other.name) for other in own)
        asked = f"the cluster without this program's own pools {names}" if own else "the whole cluster"
        raise PoolError(_describe(pool, unit, f"{asked} is smaller"))
    if on_distinct_machines and _num_machines() < len(pool.slots):
        raise PoolError(_describe(pool, unit, f"it has fewer than {len(pool.slots)} machines"))
    groups: dict[int, PlacementGroup] = {}
    taken: list[str] = []
    deadline_s = time.monotonic() + timeout_s
    with ExitStack() as undo:
        undo.callback(lambda: _remove(groups.values()))
        # The largest first: it finds room on the fewest machines.
        for machine in sorted(range(len(pool.slots)), key=lambda machine: -pool.slots[machine]):
            bundles = [unit] * pool.slots[machine]
            others = {_NODE_LABEL: f"!in({','.join(taken)})"}
            elsewhere = [others] * len(bundles) if taken and on_distinct_machines else None
            group = placement_group(bundles, strategy="STRICT_PACK", bundle_label_selector=elsewhere)
            groups[machine] = group
            slice_s = _FIRST_SLICE_S
            # Ray's `wait` blocks signals, takes a timeout below a second as 0, and with 0 may find nothing for seconds.
            while (state := _read_state(group)) != "CREATED":
                if state == "REMOVED":
                    raise PoolError(_describe(pool, unit, "the placement group of its slots was removed"))
                time.sleep(slice_s)
                slice_s = min(2 * slice_s, _LONGEST_SLICE_S)
                if time.monotonic() > deadline_s:
                    raise PoolError(_describe(pool, unit, f"they were not free within {timeout_s:g} s"))
            taken += placement_group_table(group)["bundles_to_node_id"].values()
        undo.pop_all()
    return PlacedPool(pool, [groups[machine] for machine in range(len(pool.slots))])


def _read_state(group: PlacementGroup) -> str:
    """Returns Ray's word for the state of a group; `REMOVED` for one that Ray does not know."""
    return str(placement_group_table(group).get("state", "REMOVED"))


def _remove(groups: Iterable[PlacementGroup]) -> None:
    for group in groups:
        remove_placement_group(group)


def _could_ever_fit(pool: ResourcePool, unit: dict[str, float], own: Sequence[ResourcePool]) -> bool:
    """Returns True if there is room once every other program has left; pools of this one count as taken."""
    total = _total()
    held = {kind: sum(o.num_slots for o in own if kind == "CPU" or o.device == "cuda") for kind in unit}
    largest = {kind: max((node["Resources"].get(kind, 0) for node in _alive()), default=0) for kind in unit}
    return all(
        total.get(kind, 0) - held[kind] >= amount * pool.num_slots and largest[kind] >= amount * max(pool.slots)
        for kind, amount in unit.items()
    )


def _describe(pool: ResourcePool, unit: dict[str, float], why: str) -> str:
    total, free = _total(), dict(ray.available_resources())  # type: ignore[no-untyped-call]
    kinds = ", ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind} free" for kind in unit)
    asked = " and ".join(f"{amount * pool.num_slots:g} {kind}" for kind, amount in unit.items())
    slots = " + ".join(map(str, pool.slots))
    return (
        f"pool {show(pool.name)} asks for {slots} slots, that is {asked}; the cluster has {kinds} on "
        f"{_num_machines()} machine(s): {why}. Use smaller pools, release others, or give the "
        "cluster more (num_cpus=... of the executor's own, ray start)"
    )


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def _num_machines() -> int:
    return len(_alive())


def _total() -> dict[str, float]:
    return dict(ray.cluster_resources())  # type: ignore[no-untyped-call]
