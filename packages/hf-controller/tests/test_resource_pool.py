from __future__ import annotations

import re

import pytest

from hf_controller import ResourcePool, build_pools
from hf_protocols import MachinePlan, MappingPlan, PoolError, PoolPlan


def test_slots_are_numbered_machine_by_machine():
    pool = ResourcePool([2, 3], device="cpu", name="all")
    assert pool.num_slots == 5
    assert pool.machines == (0, 0, 1, 1, 1)


@pytest.mark.parametrize("slots", [[], [2, 0], [-1], 2, [1.5], [True], ["2"], "2", b"2", None])
def test_a_machine_has_slots(slots):
    given = re.escape(repr(slots))
    with pytest.raises(PoolError, match=rf"^pool 'pool' has slots={given}. Give each machine at least one"):
        ResourcePool(slots)


def test_the_kind_of_device_is_known():
    with pytest.raises(PoolError, match=r"device='tpu' is not one of 'cuda', 'cpu'"):
        ResourcePool([1], device="tpu")


def plan(*kinds: str) -> MappingPlan:
    machines = tuple(MachinePlan(gpu_kind=kind, slots=2) for kind in kinds)
    return MappingPlan(pools=(PoolPlan(name="main", machines=machines),), models={})


def test_pools_follow_a_plan():
    pool = build_pools(plan("h100", "a100"))["main"]
    assert (pool.slots, pool.device, pool.name) == ((2, 2), "cuda", "main")
    assert build_pools(plan("cpu"))["main"].device == "cpu"


def test_a_pool_is_of_one_kind():
    with pytest.raises(PoolError, match=r"mixes host slots and GPUs \(cpu, h100\)"):
        build_pools(plan("cpu", "h100"))


@pytest.mark.parametrize("name", [5, None, ""])
def test_a_pool_has_a_name(name):
    with pytest.raises(PoolError, match=r"^a pool's name=(5|None|''). Use a name$"):
        ResourcePool([1], name=name)


@pytest.mark.parametrize("given", [{}, None, "plan.json"])
def test_pools_are_built_from_a_plan(given):
    with pytest.raises(PoolError, match=r"^build_pools: plan=.*. Use a MappingPlan, such as MappingPlan.from_json"):
        build_pools(given)
