"""Numbers as people write them: signs, currencies, separators, fractions, powers of ten, LaTeX."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

__all__ = ["Number", "find_final_number", "find_numbers", "plain_text", "read_number"]

_MINUS = "\u2212\u2013\u2012\ufe63\uff0d"
"""Minus sign, the dashes that stand for it, and the forms of East Asian text."""
_CURRENCIES = "$\u20ac\u00a3\u00a5\u20b9\u20a9\u20bd"
_CODES = "USD|EUR|GBP|JPY|CHF|INR|CAD|AUD"
_THIN_SPACES = "\u00a0\u2009\u202f\u2007"
_WORDS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MOST_DIGITS = 400
"""Of a number and of a power of ten: longer ones are not what anybody means, and take long."""

_LATEX: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (r"(?<=\d)(?=\\[dtc]?frac)", " "),
        (r"\\[dtc]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}", r"\1/\2 "),
        (r"\\[dtc]?frac\s*(\d)\s*(\d)", r"\1/\2 "),
        (r"\\(?:text|mathrm|mathbf|textbf|mbox)\s*\{([^{}]*)\}", r" \1 "),
        (r"\s*(?:\\times|\\cdot)\s*10\s*\^\s*\{?\s*(-?\d+)\s*\}?", r"e\1"),
        (r"\{,\}|(?<=\d)\\[,!:;](?=\d{3})", ","),
        (r"\\left|\\right|\\[!,:; ]", ""),
        (r"\\([$%#&])", r"\1"),
    )
)
_POWER = re.compile(r"(?<=\d)\s*[\u00d7x*]\s*10\s*(?:\^|\*\*)\s*\{?(-?\d+)\}?")
_THIN_GROUP = re.compile(rf"(?<=\d)[{_THIN_SPACES}'\u2019](?=\d{{3}}(?!\d))")

_WHOLE = r"\d{1,3}(?:\.\d{3}){2,}(?:,\d+)?|\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:,\d{2,3})*,\d{3}(?!\d)(?:\.\d+)?"
_PLAIN = r"\d+(?:,\d{1,2}(?![\d,]))|\d+(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"""
    (?<![\w.])
    (?P<sign>(?<![\w)\]}}])-|\+)?
    (?:(?:US|CA|A)?[{_CURRENCIES}]\ ?|(?:{_CODES})\ ?)?
    (?P<inner>-)?
    (?:
        (?P<mixed>\d+)\ +(?P<above>\d+)\ ?/\ ?(?P<below>\d+)(?![\d/])
      | (?P<above2>\d+)\ ?/\ ?(?P<below2>\d+)(?![\d/])
      | (?P<number>{_WHOLE}|{_PLAIN})(?:[eE](?P<power>[-+]?\d+))?
    )
    (?:\ ?(?P<word>{"|".join(_WORDS)})\b)?
    """,
    re.VERBOSE,
)
_ALONE = re.compile(r"\s*(?:[A-Za-z]\w*\s*=\s*)?(?P<sign>-\s+)?")
_SQUARE_CUBE = "\u00b2\u00b3"
_UNIT = re.compile(rf"(?:[^\W\d_]|[%\u00b0\u00b7{_CURRENCIES}{_SQUARE_CUBE}/^*.,\-\s()])*")
_LONGEST = 500
"""Characters of a text that is a number."""
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")


class Number(NamedTuple):
    """A number in a text.

    Attributes:
        value: exact.
        start: offset in the plain text.
        end: offset behind it.
    """

    value: Fraction
    start: int
    end: int


def plain_text(text: str) -> str:
    """Returns a text in which LaTeX and the many forms of signs, spaces and fractions have one form."""
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    text = _THIN_GROUP.sub(",", text)
    letters = []
    for letter in text:
        if letter in _MINUS:
            letters.append("-")
        elif not letter.isascii() and unicodedata.decomposition(letter).startswith("<fraction>"):
            space = " " if letters and letters[-1].isdigit() else ""
            letters.append(f"{space}{unicodedata.normalize('NFKC', letter)} ")
        else:
            letters.append(
                letter if letter.isascii() or letter in _SQUARE_CUBE else unicodedata.normalize("NFKC", letter)
            )
    text = "".join(letters).replace("\u2044", "/")
    return _POWER.sub(r"e\1", text)


def find_numbers(plain: str) -> Iterator[Number]:
    """Yields the numbers of a plain text in order; see `plain_text`."""
    for match in _NUMBER.finditer(plain):
        value = _value(match)
        if value is not None:
            yield Number(value, match.start(), match.end())


def read_number(text: str) -> Fraction | None:
    r"""Returns the number that a text is, with its unit or not; None for a text that is something else.

    Read are `1,200`, `$-3`, `-5 km`, `3/4`, `1 1/2`, `\frac{3}{4}`, `1.5e3`, `2 million`, `50%` (as 50), `x = 7`; and
    `1 200` with a plain space, every form of the minus sign, and fractions that are one character.
    """
    plain = re.sub(r"(?<=\d) (?=\d{3}(?!\d))", ",", plain_text(_unbox(text)).strip().strip("$").strip())
    if len(plain) > _LONGEST:
        return None
    start = _ALONE.match(plain)
    assert start is not None
    rest = plain[start.end() :]
    found = next(find_numbers(rest), None)
    if found is None or found.start or not _UNIT.fullmatch(rest, found.end):
        return None
    return -found.value if start["sign"] else found.value


def find_final_number(text: str) -> Fraction | None:
    """Returns the number that a response ends in: in its last box, else behind its last ####, else the last one."""
    boxed = _last_box(text)
    if boxed is not None and (value := read_number(boxed)) is not None:
        return value
    for part in (text.rpartition("####")[2] if "####" in text else "", text):
        numbers = list(find_numbers(plain_text(part)))
        if numbers:
            return numbers[0 if part is not text else -1].value
    return None


def _value(match: re.Match[str]) -> Fraction | None:
    digits = sum(map(len, filter(None, match.group("mixed", "above", "below", "above2", "below2", "number"))))
    power = match["power"] or "0"
    if digits > _MOST_DIGITS or len(power) > 4 or abs(int(power)) > _MOST_DIGITS:
        return None
    above, below = match["above"] or match["above2"], match["below"] or match["below2"]
    if above is not None:
        if int(below) == 0:
            return None
        value = Fraction(int(above), int(below)) + int(match["mixed"] or 0)
    else:
        value = Fraction(_decimal_point(match["number"])) * _power_of_ten(int(power))
    value *= _power_of_ten(_WORDS.get(match["word"] or "", 0))
    return -value if (match["sign"] == "-") != (match["inner"] == "-") else value


def _power_of_ten(exponent: int) -> Fraction:
    return Fraction(10**exponent) if exponent >= 0 else Fraction(1, 10**-exponent)


def _decimal_point(number: str) -> str:
    """The number with a decimal point and without separators."""
    whole, comma, decimals = number.rpartition(",")
    if comma and "." not in decimals and (len(decimals) != 3 or "." in whole):
        return f"{whole.replace('.', '').replace(',', '')}.{decimals}"
    if number.count(".") > 1:
        return number.replace(".", "")
    return number.replace(",", "")


def _unbox(text: str) -> str:
    boxed = _last_box(text)
    return text if boxed is None else boxed


def _last_box(text: str) -> str | None:
    last = None
    for match in _BOXED.finditer(text):
        last = match
    if last is None:
        return None
    depth = 1
    for offset in range(last.end(), len(text)):
        depth += {"{": 1, "}": -1}.get(text[offset], 0)
        if depth == 0:
            return text[last.end() : offset]
    return None
