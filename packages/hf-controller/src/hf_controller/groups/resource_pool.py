"""Pools of slots: which machines' devices a set of roles shares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Literal, get_args

from hf_protocols import MappingPlan, PoolError
from hf_protocols.validation import Checks, show

__all__ = ["Device", "ResourcePool", "build_pools"]

_check = Checks(PoolError)

Device = Literal["cuda", "cpu"]

_NO_LISTS = (Mapping, Set, str, bytes, bytearray)


class ResourcePool:
    """Slots on machines; a slot is a device, or on a CPU pool a host process. Pools never overlap.

    Groups that are built on one pool object share its slots: they are colocated and take turns.

    Args:
        slots: number of slots on each machine, for example `[8] * 2`. A cluster that an executor started by itself is
            one machine, which stands for all of them.
        device: `"cuda"`: a slot is one GPU; `"cpu"`: a slot is one core.
        name: the pool's name in traces and errors.

    Raises:
        PoolError: for what is not a list of whole numbers, without machines, for a machine without slots, an unknown
            device, or what is not a name.
    """

    def __init__(self, slots: Sequence[int], *, device: Device = "cuda", name: str = "pool") -> None:
        _check.name("a pool's name", name)
        _check.one_of(f"pool {show(name)}: device", device, get_args(Device))
        self.slots = _read_slots(slots, name)
        self.device = device
        self.name = name

    @property
    def num_slots(self) -> int:
        """Slots over all machines: the world size of every group on this pool."""
        return sum(self.slots)

    @property
    def machines(self) -> tuple[int, ...]:
        """For every rank the number of its machine."""
        return tuple(machine for machine, count in enumerate(self.slots) for _ in range(count))

    def __repr__(self) -> str:
        return f"ResourcePool({list(self.slots)}, device={self.device!r}, name={self.name!r})"


def _read_slots(slots: object, name: str) -> tuple[int, ...]:
    counts = tuple(slots) if isinstance(slots, Iterable) and not isinstance(slots, _NO_LISTS) else ()
    if not counts or not all(type(count) is int and count >= 1 for count in counts):
        raise PoolError(
            f"pool {show(name)} has slots={show(slots)}. Give each machine at least one, a list of whole "
            "numbers such as [8, 8]"
        )
    return counts


def build_pools(plan: MappingPlan) -> dict[str, ResourcePool]:
    """The pools of a mapping plan by name; a machine of gpu_kind `"cpu"` has host slots.

    Raises:
        PoolError: for what is not a plan; if a pool mixes host slots and GPUs.
    """
    _check.kind("build_pools: plan", plan, MappingPlan, "a MappingPlan, such as MappingPlan.from_json(text)")
    pools = {}
    for pool in plan.pools:
        on_host = {machine.gpu_kind == "cpu" for machine in pool.machines}
        if len(on_host) != 1:
            kinds = ", ".join(machine.gpu_kind for machine in pool.machines)
            raise PoolError(f"pool {show(pool.name)} mixes host slots and GPUs ({kinds}). Give each its own pool")
        slots = [machine.slots for machine in pool.machines]
        pools[pool.name] = ResourcePool(slots, device="cpu" if on_host == {True} else "cuda", name=pool.name)
    return pools
