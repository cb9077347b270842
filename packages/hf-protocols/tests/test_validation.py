from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from hf_protocols.errors import BatchError
from hf_protocols.validation import Checks, shorten, show

_check = Checks(BatchError)


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a" * 10_000, "'" + "a" * 76 + "..."),
        ("a" * 78, "'" + "a" * 78 + "'"),
        (b"\0" * 10_000, "b'" + r"\x00" * 18 + r"\x0" + "..."),
        (list(range(10**6)), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21..."),
        ({f"k{i}": "v" * 100 for i in range(10**5)}, "{'k0': '" + "v" * 69 + "..."),
        ({"a": {"b": [1, 2]}}, "{'a': {'b': [1, 2]}}"),
        (10**5000, "(int that cannot be shown)"),
        (Unshowable(), "(Unshowable that cannot be shown)"),
        (None, "None"),
    ],
    ids=["long", "just", "bytes", "list", "dict", "small", "integer", "raises", "none"],
)
def test_a_shown_value_has_at_most_80_characters(value: Any, shown: str) -> None:
    assert show(value) == shown
    assert len(shown) <= 80


class Indexable:
    def __index__(self) -> int:
        return 3

    def __repr__(self) -> str:
        return "three"


def test_a_number_of_another_library_is_named() -> None:
    with pytest.raises(BatchError, match=r"^rate=Fraction\(1, 2\) is of type Fraction, not float. Use float\(\)"):
        _check.number("rate", Fraction(1, 2))
    with pytest.raises(BatchError, match=r"^rows=three is of type Indexable, not int. Use int\(\) of it$"):
        _check.count("rows", Indexable())
    with pytest.raises(BatchError, match=r"^rate='1e-3' must be a finite number above 0$"):
        _check.number("rate", "1e-3")


def test_a_text_is_cut_at_80_characters() -> None:
    assert shorten("b" * 80) == "b" * 80
    assert shorten("b" * 81) == "b" * 77 + "..."


@pytest.mark.parametrize("weights", [3, "abc", [1.0], iter([1.0, 2.0])])
def test_weights_of_another_number_are_refused(weights: Any) -> None:
    with pytest.raises(BatchError, match=r"^weights=.*. Use one finite number >= 0 for each of the 2 rows$"):
        _check.sizes(2, weights)
