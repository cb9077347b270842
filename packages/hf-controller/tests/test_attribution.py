from __future__ import annotations

import io

from hf_controller.attribution import AttributedStream


def test_whole_lines_get_the_label_of_the_moment():
    target, labels = io.StringIO(), iter(["actor/0", "critic/0"])
    stream = AttributedStream(target, lambda: next(labels))
    stream.write("half")
    assert target.getvalue() == ""
    stream.write(" a line\nand another\nunfinished")
    stream.write("\n")
    assert target.getvalue() == "[actor/0] half a line\n[actor/0] and another\n[critic/0] unfinished\n"


def test_print_works_on_it():
    target = io.StringIO()
    print("a", 1, file=AttributedStream(target, lambda: "reward/3"), flush=True)
    assert target.getvalue() == "[reward/3] a 1\n"
