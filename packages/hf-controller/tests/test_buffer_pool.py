"""Memory of joined rows comes back when the last reader is gone, and never sooner."""

from __future__ import annotations

import threading

import pytest
import torch

from hf_controller.data.buffer_pool import BufferPool


@pytest.mark.parametrize(
    "reader",
    [
        lambda lent: lent,
        lambda lent: lent[10:20],
        lambda lent: lent.view(torch.float32),
        lambda lent: lent.numpy(),
        lambda lent: lent.numpy()[5:6],
        lambda lent: memoryview(lent.numpy()),
        lambda lent: torch.from_dlpack(lent[1:]),
        lambda lent: torch.nn.Parameter(lent.view(torch.float32)),
        lambda lent: [lent.untyped_storage()],
    ],
)
def test_a_block_stays_lent_while_anything_refers_to_it(reader):
    spare = BufferPool(1000)
    lent = spare.lend(100)
    address = lent.data_ptr()
    kept = reader(lent)
    del lent
    assert spare.num_bytes == 0 and spare.lend(100).data_ptr() != address
    del kept
    assert spare.num_bytes == 200


def test_lend_takes_the_smallest_block_up_to_twice_the_size():
    spare = BufferPool(1000)
    lent = [spare.lend(size) for size in (100, 150, 400)]
    addresses = [each.data_ptr() for each in lent]
    lent.clear()
    assert spare.num_bytes == 650
    middle = spare.lend(120)
    assert len(middle) == 120 and middle.data_ptr() == addresses[1] and spare.num_bytes == 500
    assert spare.lend(199).data_ptr() not in addresses  # 400 is more than twice as large


def test_no_more_is_kept_than_allowed_and_the_first_goes_first():
    spare = BufferPool(250)
    first, second, third = (spare.lend(100) for _ in range(3))
    addresses = {second.data_ptr(), third.data_ptr()}
    del first
    del second
    del third
    assert spare.num_bytes == 200
    again = spare.lend(100), spare.lend(100)
    assert {each.data_ptr() for each in again} == addresses
    del again
    too_large = spare.lend(300)
    del too_large
    assert spare.num_bytes == 200


def test_threads_never_get_one_block_twice():
    spare, mistakes = BufferPool(10_000), []

    def work(mark: int) -> None:
        for _ in range(300):
            lent = spare.lend(1000).fill_(mark)
            other = spare.lend(1000).fill_(mark)
            if not (lent.eq(mark).all() and other.eq(mark).all()):
                mistakes.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not mistakes and not any(thread.is_alive() for thread in threads) and spare.num_bytes <= 10_000
