"""Dynamic sampling: which groups an iteration keeps, and when it draws more."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hf_algorithms.recipes._recipe import StepContext
from hf_algorithms.recipes.dapo import DAPOConfig, fill


class Rows:
    """Stands for a batch; each row is named by its prompt and its sample."""

    def __init__(self, names: list[Any]) -> None:
        self.names = names

    @property
    def num_rows(self) -> int:
        return len(self.names)

    def repeat(self, times: int) -> Rows:
        return Rows([(name, sample) for name in self.names for sample in range(times)])

    def union(self, other: Rows) -> Rows:
        assert other.num_rows == self.num_rows
        return self

    def rows(self, index: list[int]) -> Rows:
        return Rows([self.names[row] for row in index])

    def concat(self, other: Rows) -> Rows:
        return Rows([*self.names, *other.names])


def run(
    is_kept: Callable[[int], bool], *, wanted: int = 4, left: int = 100, iteration: int = 1, **keys: Any
) -> tuple[list[Any] | None, dict[str, float], list[int]]:
    """The rows found, the counts, and how many prompts each refill asked for."""
    asked: list[int] = []
    drawn = wanted

    def more(num_prompts: int) -> Any:
        nonlocal drawn
        asked.append(num_prompts)
        drawn += num_prompts
        return Rows(list(range(drawn - num_prompts, drawn)))

    def select(batch: Rows) -> Any:
        groups = sorted({name for name, _ in batch.names})
        return SimpleNamespace(result=lambda: [group for group in groups if is_kept(group)])

    roles: Any = SimpleNamespace(
        actor=SimpleNamespace(generate_sequences=lambda prompts, sampling: prompts.repeat(sampling.n)),
        reward=SimpleNamespace(compute_reward=lambda batch: batch),
        advantage=SimpleNamespace(select_groups=select, compute_metrics=lambda batch: batch),
    )
    sampling: Any = SimpleNamespace(n=2)
    context = StepContext(
        sampling=sampling,
        iteration=iteration,
        state={},
        more_prompts=more,
        pretrain_rows=more,
        count_prompts_left=lambda: left - (drawn - wanted),
    )
    prompts: Any = Rows(list(range(wanted)))
    found: Any
    found, (_, counts) = fill(roles, prompts, DAPOConfig(**keys), context)
    return (None if found is None else found.names), counts, asked


def test_groups_are_kept_whole_and_in_order() -> None:
    rows, counts, asked = run(lambda group: True)
    assert rows == [(group, sample) for group in range(4) for sample in range(2)]
    assert (counts, asked) == ({"group/filtered": 0.0, "group/refills": 0.0}, [])


def test_dropped_groups_are_refilled_until_there_are_enough() -> None:
    rows, counts, asked = run(lambda group: group % 2 == 0)
    assert rows is not None
    assert sorted({group for group, _ in rows}) == [0, 2, 4, 6]
    assert asked == [4]
    assert counts == {"group/filtered": 4.0, "group/refills": 1.0}


def test_surplus_groups_are_dropped() -> None:
    rows, counts, asked = run(lambda group: group > 0)
    assert rows is not None
    assert [group for group, sample in rows if sample == 0] == [1, 2, 3, 4]
    assert (asked, counts["group/filtered"]) == ([4], 4.0)


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_after_the_last_refill_it_trains_on_what_there_is(limit: int) -> None:
    rows, counts, asked = run(lambda group: group == 1, max_refills=limit)
    assert rows == [(1, 0), (1, 1)]
    assert asked == [4] * limit
    assert counts == {"group/filtered": 3.0 + 4 * limit, "group/refills": float(limit)}


def test_without_any_group_there_is_nothing_to_train_on() -> None:
    rows, counts, asked = run(lambda group: False, max_refills=2)
    assert (rows, asked) == (None, [4, 4])
    assert counts == {"group/filtered": 12.0, "group/refills": 2.0}


def test_a_small_data_set_ends_the_refills() -> None:
    rows, counts, asked = run(lambda group: group == 0, left=3)
    assert (rows, asked) == ([(0, 0), (0, 1)], [])
    assert counts["group/filtered"] == 3.0


def test_a_traced_step_keeps_all_groups() -> None:
    rows, _, asked = run(lambda group: False, iteration=0)
    assert rows is not None and len(rows) == 8
    assert asked == []
