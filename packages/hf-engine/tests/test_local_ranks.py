from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from hf_engine.testing import LocalRanks


def add_ranks(number):
    total = torch.tensor([float(dist.get_rank() + number)])
    dist.all_reduce(total)
    return float(total), torch.get_num_threads()


def fail_on_rank_one():
    if dist.get_rank() == 1:
        raise ValueError("this rank is broken")


def expect_in_vain():
    with pytest.raises(ValueError):
        pass


def die():
    os._exit(3)


def come_late():
    time.sleep(1.0)


def test_failures_carry_their_traceback_and_the_ranks_come_back(capfd):
    with LocalRanks(2, timeout_s=20) as ranks:
        assert ranks.run(add_ranks, 2) == [(5.0, 1)] * 2
        with pytest.raises(RuntimeError, match=r"rank 1:\nTraceback(.|\n)*fail_on_rank_one(.|\n)*this rank is broken"):
            ranks.run(fail_on_rank_one)
        with pytest.raises(RuntimeError, match=r"expect_in_vain(.|\n)*DID NOT RAISE"):
            ranks.run(expect_in_vain)
        with pytest.raises(RuntimeError, match=r"the process of rank 0 died \(exit code 3\)"):
            ranks.run(die)
        assert ranks.run(add_ranks, 0) == [(1.0, 1)] * 2
        with pytest.raises(RuntimeError, match="rank 0 did not answer in time"):
            ranks.run(come_late, deadline_s=0.1)
        assert "BrokenPipe" not in capfd.readouterr().err, "who comes late has nobody to tell"
