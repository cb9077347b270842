"""Files as accidents leave them: cut, flipped, doubled, and with values that their writers never write.

The same draw gives the same file: a failure is named by its reader and its number.
"""

from __future__ import annotations

import csv
import io
import json
import random
import re
from collections.abc import Callable
from typing import Any

__all__ = ["mutate"]

_NESTED: Any = json.loads("[" * 200 + "]" * 200)
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 64, 0.5, -0.0, 1e-320, 1e308, -1.7e308, 1e300, float("nan"), float("inf"),
    2**31, 2**63, -(2**63), 10**400, "", " ", "a", "0", "nan", "\ud800", "\udfff\x00", "\x00", "\x1b[2J", "\u202e",
    "<b>&\"'", "[/b]", "../../etc/passwd", "/", "~", "x" * 5000, [], {}, [[]], [None], [1, "a", None], {"": None},
    {"a": {"b": []}}, _NESTED,
)  # fmt: skip
_TOML_VALUES = (
    "true", "0", "-1", "1", "3", "1e308", "nan", "inf", "-inf", "9999999999999999999999", '""', '"a"', '"\\u0000"',
    "'/'", "[]", "{}", "[1, 'a']", "[[]]", "{a = 1}", "1979-05-27", "07:32:00", "0.0", "1e-320", '"../.."', '"a:b"',
    '"' + "x" * 3000 + '"', "'''a\nb'''", "[{}]", "[{path = 1}]", '"hf_algorithms.rewards:exact_match"', '"auto"',
    '"none"', '"fsdp"', "[" * 500 + "]" * 500,
)  # fmt: skip
_PIECES = (
    b"", b"\x00", b"\xff", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\n\n", b"\\ud800", b"\\u0000", b"NaN", b"Infinity",
    b"1e999", b"-", b"9" * 400, b"9" * 5000, b'"', b"{", b"}", b"[" * 3000, b'{"a":' * 3000, b",", b"=", b"#",
    b"\xf0\x9f\x92\xa9", b"\x1b[31m", b"<script>", b"1" + b"0" * 308, b"null", b"\t", b"PAR1", b"\x1f\x8b\x08",
    b"PK\x03\x04", b"[/b]",
)  # fmt: skip


def mutate(data: bytes, kind: str, draw: random.Random) -> bytes:
    """Returns the file with one to three accidents: by its structure, or else by its bytes.

    Args:
        data: of a healthy file.
        kind: `json`, `jsonl`, `toml`, `csv`, or `bytes` for what has no structure here.
        draw: decides everything.
    """
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        by_structure = _STRUCTURES.get(kind) if draw.random() < 0.65 else None
        try:
            data = (by_structure or _change_bytes)(data, draw)
        except (ValueError, RecursionError, csv.Error):  # an earlier accident took the structure
            data = _change_bytes(data, draw)
    return data


def _change_bytes(data: bytes, draw: random.Random) -> bytes:
    start = draw.randint(0, len(data))
    end = min(len(data), start + draw.choice((0, 1, 2, 8, 64, 1000)))
    action = draw.randrange(6)
    if action == 0:
        return data[:start]
    if action == 1:
        return data[:start] + data[end:]
    if action == 2:
        return data[:end] + data[start:end] * draw.randint(1, 3) + data[end:]
    if action == 3 and start < len(data):
        return data[:start] + bytes([data[start] ^ (1 << draw.randrange(8))]) + data[start + 1 :]
    if action == 4:
        return data[:start] + draw.randbytes(draw.randint(1, 16)) + data[end:]
    return data[:start] + draw.choice(_PIECES) + data[end:]


def _change_json(data: bytes, draw: random.Random) -> bytes:
    body = _change_value(json.loads(data), draw)
    text = json.dumps(body, ensure_ascii=draw.random() < 0.8, indent=draw.choice((None, 2)))
    return text.encode("utf-8", "surrogatepass")


def _change_value(body: Any, draw: random.Random) -> Any:
    """The value with one node replaced, dropped, doubled or renamed; deep nodes are as likely as shallow ones."""
    nodes: list[tuple[Any, Any]] = []
    _list_nodes(body, nodes)
    if not nodes or draw.random() < 0.02:
        return draw.choice(_VALUES)
    holder, key = draw.choice(nodes)
    action = draw.randrange(8)
    if action == 0:
        del holder[key]
    elif action == 1 and isinstance(holder, dict):
        holder[draw.choice(("", "a", "\ud800", key + "x", key.upper(), "x" * 3000))] = holder.pop(key)
    elif action == 2:
        holder[key] = (
            holder[key] * draw.choice((-1, 0, 3)) if isinstance(holder[key], (str, list, int, float)) else [holder[key]]
        )
    elif action == 3:
        other, place = draw.choice(nodes)
        holder[key] = _copy(other[place])
    else:
        holder[key] = _copy(draw.choice(_VALUES))
    return body


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value)) if isinstance(value, (dict, list)) else value


def _list_nodes(body: Any, found: list[tuple[Any, Any]]) -> None:
    for key in body if isinstance(body, dict) else range(len(body)) if isinstance(body, list) else ():
        found.append((body, key))
        _list_nodes(body[key], found)


def _change_lines(data: bytes, draw: random.Random) -> bytes:
    lines = data.split(b"\n")
    place = draw.randrange(len(lines))
    action = draw.randrange(6)
    if action == 0:
        del lines[place]
    elif action == 1:
        lines.insert(place, lines[draw.randrange(len(lines))])
    elif action == 2:
        lines[place] = draw.choice((b"", b"null", b"[]", b"{}", b"1", b'"a"', b"{", b" ", b"\x00", b"[" * 3000))
    else:
        lines[place] = _change_json(lines[place] or b"{}", draw).replace(b"\n", b" ")
    return b"\n".join(lines)


def _change_toml(data: bytes, draw: random.Random) -> bytes:
    lines = data.decode().split("\n")
    places = [place for place, line in enumerate(lines) if re.match(r"\s*[\w\"']+ *=", line)]
    if not places:
        raise ValueError("no line holds a key")
    place = draw.choice(places)
    key, _, value = lines[place].partition("=")
    action = draw.randrange(8)
    if action == 0:
        del lines[place]
    elif action == 1:
        lines.insert(place, draw.choice(lines))
    elif action == 2:
        lines[place] = f"{key.strip()}{draw.choice(('x', '.a', '-'))} ={value}"
    elif action == 3:
        lines[place] = f"{key}={lines[draw.choice(places)].partition('=')[2]}"
    else:
        lines[place] = f"{key}= {draw.choice(_TOML_VALUES)}"
    return "\n".join(lines).encode()


def _change_csv(data: bytes, draw: random.Random) -> bytes:
    rows = list(csv.reader(io.StringIO(data.decode())))
    if not rows or not rows[0]:
        raise ValueError("no columns")
    row = draw.choice(rows)
    if not row:
        raise ValueError("an empty row")
    place = draw.randrange(len(row))
    action = draw.randrange(5)
    if action == 0:
        del row[place]
    elif action == 1:
        row.insert(place, draw.choice(rows[0]))
    else:
        value = draw.choice((*_VALUES, "1e400", "-1e308", "0x10", "1_000", "100%", "A100", "7b", "llama-2-7b"))
        row[place] = value if isinstance(value, str) else str(value)[:5000]
    out = io.StringIO()
    csv.writer(out).writerows(rows)
    return out.getvalue().encode("utf-8", "surrogatepass")


_STRUCTURES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "json": _change_json,
    "jsonl": _change_lines,
    "toml": _change_toml,
    "csv": _change_csv,
}
