"""Hints for misspelled names."""

from __future__ import annotations

from difflib import SequenceMatcher

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_protocols.similar_names import describe_choices, find_similar


@pytest.mark.parametrize(
    ("name", "known", "similar"),
    [
        ("itertions", ["iterations", "seed"], ["iterations"]),
        ("SEED", ["iterations", "seed"], ["seed"]),
        ("resume", ["seed", "output_dir", "executor"], []),
        ("a100", ["h100", "a100-40", "a100-80"], ["a100-40", "a100-80", "h100"]),
        ("gpro", ["gmpo", "gspo", "grpo"], ["grpo", "gmpo", "gspo"]),
        ("abc", ["ab"], ["ab"]),
        ("abcde", ["abcfg"], []),  # 0.6 itself is not above it
        ("", ["seed"], []),
        ("seed", [], []),
    ],
)
def test_similar_names_are_found_best_first(name: str, known: list[str], similar: list[str]) -> None:
    assert find_similar(name, known, most=3) == similar


names = st.text("abcde_", max_size=8)


@given(names, st.lists(names, max_size=6))
def test_similar_means_a_ratio_above_six_tenths(name: str, known: list[str]) -> None:
    similar = find_similar(name, known, most=len(known))
    ratios = {each: SequenceMatcher(a=each, b=name).ratio() for each in known}
    assert set(similar) == {each for each in known if ratios[each] > 0.6}
    ranks = [(each.startswith(name), ratios[each]) for each in similar]
    assert ranks == sorted(ranks, reverse=True)


@pytest.mark.parametrize(
    ("name", "known", "text"),
    [
        ("itertions", ["iterations", "seed"], "Did you mean iterations?"),
        ("a100", ["a100-40", "a100-80", "l40s"], "Did you mean a100-40 or a100-80?"),
        ("gpro", ["gmpo", "gspo", "grpo", "gdpo"], "Did you mean grpo, gdpo or gmpo?"),
        ("rtx-5090", ["rtx-4090", "h100"], "Did you mean rtx-4090?"),
        ("zzzz", ["iterations", "seed"], "Use one of iterations, seed"),
        ("zzzz", [], "Use one of none"),
    ],
)
def test_a_remedy_lists_all_names_only_where_none_is_near(name: str, known: list[str], text: str) -> None:
    assert describe_choices(name, iter(known)) == text
