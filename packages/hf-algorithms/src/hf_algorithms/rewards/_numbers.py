"""Numbers as people write them: signs, currencies, separators, fractions, powers of ten, LaTeX."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import NamedTuple

__all__ = ["Number", "find_final_number", "find_numbers", "plain_text", "read_answer", "read_number"]

_MINUS = "\u2212\u2013\u2012\u2011\u2010\ufe63\uff0d"
"""Minus sign, the dashes and hyphens that stand for it, and the forms of East Asian text."""
_CURRENCIES = "$\u20ac\u00a3\u00a5\u20b9\u20a9\u20bd\u20ba\u20b4\u20ab\u20b1\u20a6\u20aa\u0e3f\u00a2"
_CODES = "USD|EUR|GBP|JPY|CHF|INR|CAD|AUD"
_THIN_SPACES = "\u00a0\u2009\u202f\u2007"
_WORDS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SUFFIXES = {"k": 3, "m": 6, "mn": 6, "b": 9, "bn": 9}
"""Behind an amount of money, such as `$2.5M`."""
_MOST_DIGITS = 400
"""Most digits of a number and of a power of ten: longer ones are not meant as numbers, and take long."""


def _write_fraction(match: re.Match[str]) -> str:
    sign = "-" if (match[1] == "-") != (match[3] == "-") else ""
    return f"{sign}{match[2]}/{match[4]} "


def _write_power(match: re.Match[str]) -> str:
    base, exponent = int(match[1]), int(match[2])
    if base == 10:
        return f"1e{exponent}"
    return str(base**exponent) if 0 <= exponent <= _MOST_EXPONENT else match[0]


def _write_raised(match: re.Match[str]) -> str:
    sign, digits = match.groups()
    return f"^{{{'-' if sign else ''}{unicodedata.normalize('NFKC', digits)}}}" if digits else match[0]


_MOST_EXPONENT = 64
_PART = r"\d+(?:,\d{3})*(?:\.\d+)?"
_LATEX: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (r"(?<=\d)(?=\\[dtc]?frac)", " "),
        (rf"\\[dtc]?frac\s*\{{\s*(-?)({_PART})\s*\}}\s*\{{\s*(-?)({_PART})\s*\}}", _write_fraction),
        (r"\\[dtc]?frac\s*(\d)\s*(\d)", r"\1/\2 "),
        (r"\\(?:text|mathrm|mathbf|textbf|mbox)\s*\{([^{}]*)\}", r" \1 "),
        (r"\s*(?:\\times|\\cdot)\s*10\s*\^\s*\{?\s*(-?\d+)\s*\}?", r"e\1"),
        (r"\{,\}|(?<=\d)\\[,!:;](?=\d{3})", ","),
        (r"\^\s*\{?\s*\\circ\s*\}?", "\u00b0"),
        (r"\\left|\\right|\\[!,:; ()\[\]]", ""),
        (r"\\([$%#&])", r"\1"),
    )
)
_RAISED_DIGITS = "\u2070\u00b9\u00b2\u00b3\u2074-\u2079"
_RAISED = re.compile(rf"(?<![\d)\]}}])[\u00b2\u00b3](?![{_RAISED_DIGITS}])|\u207a?(\u207b?)([{_RAISED_DIGITS}]+)")
"""Raised digits, such as those of a power of ten; a square or cube that is not behind a number is a unit's."""
_POWER = re.compile(r"(?<=\d)\s*[\u00d7\u00b7\u22c5x*]\s*10\s*(?:\^|\*\*)\s*\{?(-?\d+)\}?")
_WHOLE_POWER = re.compile(r"(?<![\w.,])(\d{1,6})\s*\^\s*\{?(-?\d{1,3})\}?(?!\d)")
_THIN_GROUP = re.compile(rf"(?<=\d)[{_THIN_SPACES}'\u2019](?=\d{{3}}(?!\d))")
_SPACED_GROUPS = re.compile(r"(?<![\w.,^/])(?<!\d )([1-9]\d{0,2}(?: \d{3})+)(?![\d/]| /)")

_WHOLE = r"\d{1,3}(?:\.\d{3}){2,}(?:,\d+)?|\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:,\d{2,3})*,\d{3}(?!\d)(?:\.\d+)?"
_PLAIN = r"\d+(?:,\d{1,2}(?![\d,]))|\d+(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"""
    (?<![\w.^])(?<!\^[-{{])(?<!\^{{-)
    (?P<sign>(?<![\w)\]}}])-|\+)?
    (?P<currency>(?:US|CA|A)?[{_CURRENCIES}]\ ?|(?:{_CODES})\ ?)?
    (?P<inner>-)?
    (?:
        (?P<mixed>\d+)\ +(?P<above>\d+)\ ?/\ ?(?P<below>\d+)(?![\d/])
      | (?P<above2>{_PART})\ ?/\ ?(?P<below2>{_PART})(?![\d/])
      | (?P<number>{_WHOLE}|{_PLAIN})(?:[eE](?P<power>[-+]?\d+))?
    )
    (?:\ ?(?P<word>{"|".join(_WORDS)})\b|(?P<suffix>(?(currency)(?:[kKmMbB]|[mb]n)\b|(?!))))?
    """,
    re.VERBOSE,
)
_ALONE = re.compile(r"\s*(?:(?:[A-Za-z]\w*\s*)?[=~\u2248]\s*)?(?P<sign>-\s+)?")
_SQUARE_CUBE = "\u00b2\u00b3"
_LENGTHS = r"(?:[cdkm]?m|in|ft|yd|mi|inches|feet|yards|miles|met(?:er|re)s?|units?|s)"
_UNIT_POWER = re.compile(rf"\b{_LENGTHS}\s*\^")
_UNIT = re.compile(
    rf"(?:{_LENGTHS}\s*\^\s*\{{?-?\d\}}?|[^\W\d_]|[%\u00b0\u00b7{_CURRENCIES}{_SQUARE_CUBE}/^*.,\-\s()])*"
)
_EXPRESSION = re.compile(r"\\[A-Za-z]+|[\^\u221a\u03c0]")
"""Part of an expression whose value is not one of its numbers."""
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
    text = _RAISED.sub(_write_raised, text)
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    text = _SPACED_GROUPS.sub(lambda match: match[1].replace(" ", ""), _THIN_GROUP.sub(",", text))
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
    text = "".join(letters).replace("\u2044", "/").replace("\u2215", "/")
    return _WHOLE_POWER.sub(_write_power, _POWER.sub(r"e\1", text))


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
    plain = plain_text(_unbox(text)).strip(" \t\r\n*")
    while len(plain) > 1 and plain[0] == plain[-1] == "$":
        plain = plain[1:-1].strip()
    if len(plain) > _LONGEST:
        return None
    start = _ALONE.match(plain)
    assert start is not None
    rest = plain[start.end() :]
    found = next(find_numbers(rest), None)
    if found is None or found.start or not _UNIT.fullmatch(rest, found.end):
        return None
    return -found.value if start["sign"] else found.value


def read_answer(text: str) -> Fraction | None:
    """Returns the number that an answer of the data is or, as in a worked solution, ends in; None for an expression."""
    number = read_number(text)
    if number is None and ("####" in text or _last_box(text) is not None or not _is_expression(plain_text(text))):
        number = find_final_number(text)
    return number


def _is_expression(plain: str) -> bool:
    return _EXPRESSION.search(_UNIT_POWER.sub("", plain)) is not None


def _read_box(boxed: str) -> Fraction | None:
    """The number of a box, or the only one in its words; None for an expression."""
    value, plain = read_number(boxed), plain_text(boxed)
    numbers = list(find_numbers(plain))
    if value is None and len(numbers) == 1 and not _is_expression(plain):
        return numbers[0].value
    return value


def find_final_number(text: str) -> Fraction | None:
    """Returns the number that a response ends in: in its last box, else behind its last ####, else the last one."""
    boxed = _last_box(text)
    if boxed is not None and any(map(str.isdigit, boxed)):
        return _read_box(boxed)
    whole = text.rpartition("####")[2].strip().partition("\n")[0] if "####" in text else text
    if (value := read_number(whole)) is not None:
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
        parts = [Fraction(each.replace(",", "")) for each in (above, below)]
        if not parts[1]:
            return None
        value = parts[0] / parts[1] + int(match["mixed"] or 0)
    else:
        value = Fraction(_decimal_point(match["number"])) * _power_of_ten(int(power))
    value *= _power_of_ten(_WORDS.get(match["word"] or "", _SUFFIXES.get((match["suffix"] or "").lower(), 0)))
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
