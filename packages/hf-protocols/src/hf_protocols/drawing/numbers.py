"""Numbers as people read them, and the round values of an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = [
    "format_bytes",
    "format_duration",
    "format_gib",
    "format_milliseconds",
    "format_number",
    "format_seconds",
    "format_sparkline",
    "round_ticks",
]


def format_number(value: float) -> str:
    """Three or four significant digits: `0.362`, `41.3`, `3,214`, `1.2e-05`."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if value == int(value) and size < 1e6:
        return f"{int(value):,}"
    if size >= 100 and size < 1e6:
        return f"{value:,.0f}"
    if size >= 0.001 and size < 100:
        return f"{value:.3g}"
    return f"{value:.2g}"


def format_duration(seconds: float) -> str:
    """`0.52 s`, `41 s`, `2:31 min` or `1:02:31 h`."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"


def format_milliseconds(microseconds: float) -> str:
    """`0.21 ms`, `34.0 ms` or `1.25 s`."""
    milliseconds = microseconds / 1e3
    if milliseconds >= 1000:
        return f"{milliseconds / 1e3:.2f} s"
    return f"{milliseconds:.2f} ms" if milliseconds < 1 else f"{milliseconds:.1f} ms"


def format_bytes(num_bytes: float) -> str:
    """`812 B`, `3.4 KiB`, `2.9 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def format_gib(num_bytes: float) -> str:
    """GiB in three digits, for columns that name the unit."""
    return f"{num_bytes / 2**30:.3g}"


def format_seconds(seconds: float) -> str:
    """Three digits, whole seconds from 100 on, for columns that name the unit."""
    return f"{seconds:.3g}" if seconds < 100 else f"{seconds:.0f}"


def round_ticks(low: float, high: float, count: int) -> list[float]:
    """At most `count + 1` multiples of 1, 2 or 5 times a power of ten that lie in [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def format_sparkline(values: Sequence[float]) -> str:
    """Returns one block character per finite value, from the lowest to the highest."""
    finite = [value for value in values if abs(value) < float("inf")]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    return "".join(chr(0x2581 + (round(7 * (value - low) / span) if span else 0)) for value in finite)
