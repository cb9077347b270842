from __future__ import annotations

import itertools
import random

import pytest

from hf_mapper import ClusterSpec, MachineSpec, PoolRequest, gpu, pack, set_partitions
from hf_mapper.search.placements import fits


def build_cluster(*machines: tuple[str, int, int]) -> ClusterSpec:
    specs = tuple(MachineSpec(gpu=gpu(kind), num_gpus=size, num_machines=count) for kind, size, count in machines)
    return ClusterSpec(machines=specs, inter_bandwidth_bytes_per_s=25e9)


def requests(*counts: int, machine: int = 0) -> list[PoolRequest]:
    return [PoolRequest(machine=machine, num_gpus=count) for count in counts]


@pytest.mark.parametrize(("count", "bell"), [(0, 1), (1, 1), (2, 2), (3, 5), (4, 15), (5, 52), (6, 203)])
def test_partitions_are_as_many_as_bell_numbers_say(count: int, bell: int) -> None:
    items = "abcdef"[:count]
    found = list(set_partitions(items))
    assert len(found) == len({frozenset(map(frozenset, partition)) for partition in found}) == bell
    assert all(sorted(itertools.chain(*partition)) == list(items) for partition in found)


def test_partitions_start_with_one_pool_and_end_with_all_apart() -> None:
    found = list(set_partitions(["actor", "critic", "reference"]))
    assert found[0] == (("actor", "critic", "reference"),)
    assert found[-1] == (("actor",), ("critic",), ("reference",))
    assert [len(partition) for partition in found] == sorted(len(partition) for partition in found)


def test_equal_items_stay_apart() -> None:
    assert list(set_partitions([7, 7])) == [((7, 7),), ((7,), (7,))]


def test_whole_machines_come_first_and_the_rest_is_in_one() -> None:
    placed = pack(build_cluster(("h100", 8, 4)), requests(20, 4, 8))
    assert placed is not None
    assert [[(slots.index, slots.slots) for slots in pool] for pool in placed] == [
        [(0, 8), (1, 8), (3, 4)],
        [(3, 4)],
        [(2, 8)],
    ]


def test_a_rest_is_never_torn_over_two_machines() -> None:
    cluster = build_cluster(("h100", 8, 2))
    assert pack(cluster, requests(5, 5, 6)) is None
    assert pack(cluster, requests(5, 3, 6, 2)) is not None


def test_pools_stay_on_the_kind_they_ask_for() -> None:
    cluster = build_cluster(("a100-80", 4, 1), ("h100", 8, 1))
    placed = pack(cluster, [*requests(4), *requests(8, machine=1)])
    assert placed is not None
    assert [(slots.machine, slots.slots) for pool in placed for slots in pool] == [(0, 4), (1, 8)]
    assert pack(cluster, requests(5)) is None


def fits_somehow(size: int, count: int, pools: list[int]) -> bool:
    """Every choice of whole machines and of a machine for each rest, tried one by one."""
    whole = sum(pool // size for pool in pools)
    rests = [pool % size for pool in pools if pool % size]
    if whole > count:
        return False
    for choice in itertools.product(range(count - whole), repeat=len(rests)):
        loads = [0] * count
        for rest, machine in zip(rests, choice, strict=True):
            loads[machine] += rest
        if max(loads) <= size:
            return True
    return not rests


def test_pack_finds_a_place_exactly_when_there_is_one() -> None:
    chance = random.Random(0)
    answers = []
    for _ in range(300):
        size, count = chance.randint(1, 8), chance.randint(1, 4)
        pools = [chance.randint(1, size * count) for _ in range(chance.randint(1, 4))]
        placed = pack(build_cluster(("h100", size, count)), requests(*pools))
        answers.append(placed is not None)
        assert answers[-1] == fits_somehow(size, count, pools)
        assert fits(build_cluster(("h100", size, count)), requests(*pools)) == answers[-1]
        if placed is not None:
            assert [sum(slots.slots for slots in pool) for pool in placed] == pools
            loads = [0] * count
            for slots in itertools.chain(*placed):
                loads[slots.index] += slots.slots
            assert max(loads) <= size
    assert 50 < sum(answers) < 250


def test_smaller_requests_fit_where_larger_ones_did() -> None:
    chance = random.Random(1)
    fitted = 0
    for _ in range(300):
        cluster = build_cluster(("h100", 8, chance.randint(1, 4)))
        pools = [chance.randint(1, 16) for _ in range(chance.randint(1, 4))]
        if pack(cluster, requests(*pools)) is not None:
            fitted += 1
            assert pack(cluster, requests(*(chance.randint(1, pool) for pool in pools))) is not None
    assert fitted > 50
