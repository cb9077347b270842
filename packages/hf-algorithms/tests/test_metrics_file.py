from __future__ import annotations

import json
import math
import os
import random

import pytest

from hf_algorithms.report._decimation import decimate
from hf_algorithms.report._metrics_file import MetricsFile, parse_row


def _lines(first, last, **columns):
    return "".join(
        json.dumps({"iteration": i, **{name: value(i) for name, value in columns.items()}}) + "\n"
        for i in range(first, last + 1)
    )


def _read(file):
    iterations, columns = file.columns()
    return list(iterations), {name: list(values) for name, values in columns.items()}


def test_appended_lines_are_read_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    assert not file.refresh()
    assert not file.exists
    path.write_text(_lines(1, 2, a=float))
    assert not file.refresh()
    before = file.version
    with path.open("a") as appended:
        appended.write('{"iteration": 3, "a": 3.0, "b"')
    file.refresh()
    assert (file.num_rows, file.version, file.notes) == (2, before, ())
    with path.open("a") as appended:
        appended.write(': 7}\n{"iteration": 4, "b": null}\n')
    file.refresh()
    iterations, columns = _read(file)
    assert iterations == [1, 2, 3, 4]
    assert columns["a"][:3] == [1, 2, 3]
    assert columns["b"][2] == 7
    assert all(map(math.isnan, [columns["a"][3], *columns["b"][:2], columns["b"][3]]))
    assert file.last == {"iteration": 4}
    assert file.version != before


def test_small_steps_read_the_same_as_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(_lines(1, 200, a=lambda i: i / 7, b=lambda i: -i))
    whole, stepwise = MetricsFile(path), MetricsFile(path)
    whole.refresh()
    steps = 1
    while stepwise.refresh(10):  # less than a line
        steps += 1
    assert steps > 100
    assert _read(stepwise) == _read(whole)


def test_damaged_lines_are_named_and_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 1, "a": NaN, "c": true, "d": "x"}\n\xff\n[1]\n{"iteration": 4, "a": 2}\n{"iter')
    file = MetricsFile(path)
    file.refresh()
    assert _read(file) == ([1, 4], {"a": [pytest.approx(math.nan, nan_ok=True), 2]})
    assert file.notes == ("metrics.jsonl, line 2, is not a JSON object", "metrics.jsonl, line 3, is not a JSON object")
    file.refresh(has_ended=True)
    assert file.notes[2] == "metrics.jsonl, line 5, is not a JSON object"


def test_a_replaced_file_is_read_from_its_beginning(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(_lines(1, 5, a=float))
    file = MetricsFile(path)
    file.refresh()
    (tmp_path / "other").write_text(_lines(1, 9, b=float))
    os.replace(tmp_path / "other", path)
    file.refresh()
    assert _read(file) == (list(range(1, 10)), {"b": list(range(1, 10))})
    path.unlink()
    file.refresh()
    assert not file.exists
    assert file.num_rows == 9


def test_a_long_file_is_sampled_until_it_is_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = 30_000
    path.write_text(_lines(1, rows, **{f"metric/{n}_with_a_name": lambda i: i * 0.123456789 for n in range(4)}))
    file = MetricsFile(path)
    assert file.refresh(1 << 16)
    iterations, columns = _read(file)
    assert (iterations[0], iterations[-1]) == (1, rows)
    assert 300 < len(iterations) < 1000
    assert columns["metric/2_with_a_name"] == [i * 0.123456789 for i in iterations]
    assert file.last["iteration"] == rows
    assert file.share_read < 0.05
    while file.refresh(1 << 20):
        pass
    assert _read(file)[0] == list(range(1, rows + 1))
    assert file.share_read == 1


@pytest.mark.parametrize("line", ["", "{", "[1]", "1" * 5000, "[" * 100_000, '"x"'])
def test_what_is_not_an_object_is_not_a_row(line):
    assert parse_row(line) is None


def test_numbers_outside_a_float_are_left_out():
    assert parse_row('{"a": 1' + "0" * 400 + ', "b": 2, "c": Infinity}') == {"b": 2.0}


def test_decimation_keeps_the_extremes_of_every_stretch():
    draw = random.Random(0)
    ys = [draw.gauss(0, 1) for _ in range(10_007)]
    ys[1234], ys[7777], ys[55] = 100.0, -100.0, math.nan
    xs = [3.0 * i for i in range(len(ys))]
    points, means = decimate(xs, ys, 400)
    assert len(points) <= 401
    assert [x for x, _ in points] == sorted({x for x, _ in points})
    assert (3.0 * 1234, 100.0) in points
    assert (3.0 * 7777, -100.0) in points
    assert points[-1] == (xs[-1], ys[-1])
    assert set(points) <= set(zip(xs, ys, strict=True))
    known = [y for y in ys if math.isfinite(y)]
    width = math.ceil(len(known) / 200)
    assert len(means) == math.ceil(len(known) / width)
    assert means[3][1] == pytest.approx(sum(known[3 * width : 4 * width]) / width)
    assert decimate(xs[:5], ys[:5], 400) == (list(zip(xs[:5], ys[:5], strict=True)), [])
