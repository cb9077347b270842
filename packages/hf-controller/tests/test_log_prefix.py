from __future__ import annotations

import io
import time

from hf_controller.executors.ray.actor import PrefixedStream
from hf_protocols import PerRank


def test_whole_lines_get_the_label_of_the_moment():
    target, labels = io.StringIO(), iter(["actor/0", "critic/0"])
    stream = PrefixedStream(target, lambda: next(labels))
    stream.write("half")
    assert target.getvalue() == ""
    stream.write(" a line\nand another\nunfinished")
    stream.write("\n")
    assert target.getvalue() == "[actor/0] half a line\n[actor/0] and another\n[critic/0] unfinished\n"


def test_print_works_on_it():
    target = io.StringIO()
    print("a", 1, file=PrefixedStream(target, lambda: "reward/3"), flush=True)
    assert target.getvalue() == "[reward/3] a 1\n"


def test_what_ranks_print_reaches_the_program_with_role_and_rank(ray_stage, capfd):
    """Fused roles share a process; a line says which of them wrote it."""
    ray_stage.two.say(PerRank(["apples", "pears"])).result()
    ray_stage.sharded.say(PerRank(["plums", "figs"])).result()
    wanted = ("[two/0] apples", "[two/1] pears", "[sharded/0] plums", "[sharded/1] figs")
    shown, deadline_s = "", time.monotonic() + 30.0
    while not all(line in shown for line in wanted):
        assert time.monotonic() < deadline_s, shown
        time.sleep(0.1)
        shown += "".join(capfd.readouterr())
