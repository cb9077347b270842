"""Numbers are read as people write them, in answers and in responses."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from hf_algorithms.rewards import find_final_number, gsm8k_accuracy, math_verify, number_match, read_number

WRITTEN = {
    "1200": ["1200", "1,200", "1 200", "1\u202f200", "1{,}200", r"1\,200", "1.200,00", "1\u2019200", "1200.", "$1,200"],
    "-3": [
        "-3",
        "\u22123",
        "\u20133",
        "$-3",
        "-$3",
        "- 3",
        "-3.0",
        "\u22123 \u00b0C",
        "x = -3",
        "\u20113",
        r"\(-3\)",
        r"\frac{6}{-2}",
    ],
    "18": [
        "18",
        "$18",
        r"\$18",
        "18 dollars",
        "18%",
        r"18\%",
        "USD 18",
        "18 USD",
        "\u20ac18",
        "1\uff18",
        r"\text{18}",
        "$18$",
    ],
    "3/4": ["3/4", "0.75", ".75", "\u00be", r"\frac{3}{4}", r"\dfrac34", "6/8", "0,75", r"\boxed{\frac{3}{4}}"],
    "-3/4": ["-3/4", r"-\frac{3}{4}", "-\u00be"],
    "3/2": ["1 1/2", "1\u00bd", "1.5", r"1\frac{1}{2}", "3\u20442"],
    "2000000": [
        "2 million",
        "2,000,000",
        "2.000.000",
        "20,00,000",
        "2e6",
        "2 \\times 10^{6}",
        "2 \u00d7 10^6",
        "$2 million",
    ],
    "12": [
        "12 km/h",
        "12 m\u00b2",
        "12 apples per day",
        "12 (in total)",
        "12 cm^2",
        r"12\,\mathrm{m}^{2}",
        "**12**",
        "\u2248 12",
        r"12^\circ",
        "12\u00a2",
        "12 cm\u207b\u00b9",
    ],
    "1000": ["10^3", "10^{3}", "10\u00b3", "1 \u00d7 10\u00b3", "$1k", r"\frac{3,000}{3}"],
    "3000000": ["3 \u00d7 10\u2076", "3\u00d710\u2076", "3\\times10\u2076", "3 \u22c5 10\u2076"],
    "1/100": ["10\u207b\u00b2", "1\u00b710^{-2}", "0.01"],
    "32": ["2\u2075", "2^5"],
    "1/2": ["1.5/3", r"\frac{1.5}{3}", "1\u22152"],
    "2500000": ["$2.5M", "USD 2.5mn", "2.5 million"],
}
NOT_NUMBERS = ["", "three", "5 apples and 3 pears", "1/0", "12/25/2024", "1e99999", "x", "9" * 5000, "v1.2.3"]


@pytest.mark.parametrize(
    ("text", "value"), [(text, value) for value, texts in WRITTEN.items() for text in texts], ids=str
)
def test_a_number_is_read_however_it_is_written(text: str, value: str) -> None:
    assert read_number(text) == Fraction(value)
    assert find_final_number(f"First 7, then 10-5. \\boxed{{{text}}}") == Fraction(value)
    marked = value if text[0] in "\\x-*\u2248" else text
    assert gsm8k_accuracy([""], [f"#### {marked}"], [text]) == [1.0]


@pytest.mark.parametrize("text", NOT_NUMBERS)
def test_other_texts_are_not_numbers(text: str) -> None:
    assert read_number(text) is None


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("so 10-5 is 5", 5),
        ("it is -5.", -5),
        ("the answer is **18**.", 18),
        ("a \\boxed{2} b 7", 2),
        ("#### 5 of 6", 5),
        ("costs $1,234.50.", Fraction("1234.5")),
        ("no number", None),
        ("\\boxed{x} and 4", 4),
        ("1, 2, 3", 3),
        ("so 12 and \\boxed{3\\sqrt{13}}", None),
        ("\\boxed{\\text{It is } 5}", 5),
        ("The area is 25 cm^2.", 25),
        ("#### 1 200", 1200),
        ("1 200", 1200),
        ("The total is 1 200.", 1200),
        ("They pay 1 200 euros", 1200),
        ("It is 12 345 678,50 in all", Fraction("12345678.5")),
        ("in all 1\u202f200 or so", 1200),
        ("in all 1\u2009200 or so", 1200),
        ("in all 1\u00a0200 or so", 1200),
        ("in 2023 200 came", 200),
        ("add 1 2000", 2000),
        ("a mix of 5 100/200", Fraction("5.5")),
        ("It costs $5k.", 5000),
        ("273K", 273),
    ],
)
def test_the_final_number_of_a_response(response: str, value: Any) -> None:
    assert find_final_number(response) == value


@pytest.mark.parametrize("answer", ["3x^2", r"3\sqrt{13}", r"\boxed{2\pi}", "x^2 + 3 = y"])
def test_an_expression_is_not_an_answer_in_numbers(answer: str) -> None:
    with pytest.raises(ValueError, match=r"is not a number: math_verify compares expressions"):
        number_match([""], ["3"], [answer])
    assert number_match([""], ["3"], ["The answer is 3 cm^2."]) == [1.0]


def test_number_match_compares_values() -> None:
    assert number_match([""] * 3, ["it is $1,200.00", "0.5", "2"], ["1200", "#### 1/2", "3"]) == [1.0, 1.0, 0.0]


def test_math_verify_compares_expressions() -> None:
    pytest.importorskip("math_verify")
    responses = [r"so \boxed{\frac{1}{2}}", "$x^2+2x+1$", "it is 3", r"\boxed{(1,2)}"]
    assert math_verify([""] * 4, responses, ["0.5", "(x+1)^2", "4", "(1,2)"]) == [1.0, 1.0, 0.0, 1.0]
