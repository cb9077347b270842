"""Payload of the controller is small, however large the batch; counted in its process, where Ray packs it."""

from __future__ import annotations

import pytest
import ray
import torch
from payload import count_payload
from tensordict import TensorDict

from hf_controller.executors.ray.wire import pack_once, unpack_call
from hf_controller.groups.call import Call

LIMIT_BYTES = 64 * 1024


def batch(num_rows: int) -> TensorDict:
    return TensorDict({"x": torch.ones(num_rows, 1024)}, batch_size=[num_rows])


@pytest.mark.parametrize("num_rows", [4, 64, 4096])  # 4 KiB in each row: up to 16 MiB
def test_rows_pass_by_the_controller(ray_stage, num_rows):
    source = ray_stage.two.step(batch(num_rows))
    source.wait()
    with count_payload() as payload:
        made = ray_stage.three.step(source)
        made.wait()
    assert 0 < payload.num_bytes < LIMIT_BYTES
    assert made.num_rows == num_rows


def test_chosen_rows_cost_a_few_bytes_each(ray_stage):
    num_rows = 4096
    source = ray_stage.two.step(batch(num_rows))
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))
    payloads = {}
    for name, chosen in {"all": source, "permuted": source.rows(order)}.items():
        with count_payload() as payload:
            ray_stage.solo.step(chosen).wait()
        payloads[name] = payload.num_bytes
    assert payloads["permuted"] - payloads["all"] <= 8 * num_rows


def test_many_references_are_stored_once_for_all_ranks(ray_executor):
    handles = [ray.put(number) for number in range(100)]
    call = Call(1, "role", "method", (), {}, after=handles, submit_s=0.0, timeout_s=1.0, labels={})
    message, inputs = pack_once(call)
    assert inputs == handles
    assert isinstance(message[1], ray.ObjectRef)
    read = ray.remote(num_cpus=0)(lambda *message: ray.get(list(unpack_call(*message).after)))
    assert ray.get([read.remote(*message) for _ in range(2)], timeout=60) == [list(range(100))] * 2


def test_the_counter_sees_rows_that_do_pass(ray_stage):
    made = ray_stage.solo.step(batch(64))
    with count_payload() as payload:
        made.result()
    assert payload.received_bytes >= 64 * 4096
