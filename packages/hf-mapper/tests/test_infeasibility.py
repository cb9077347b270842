from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest

from hf_mapper import ClusterSpec, GpuSpec, MachineSpec, gpu, is_feasible, map_dataflow
from hf_protocols import PlanError

Build = Callable[..., Any]


def refuse(problem: Any) -> str:
    with pytest.raises(PlanError) as raised:
        map_dataflow(*problem)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_the_memory_that_is_missing_is_what_would_do(paper_problem: Build) -> None:
    """13B PPO on 8 GPUs: with the missing memory added it fits, with a hundredth less it does not."""
    problem = paper_problem("ppo", "llama-2-13b", 8)
    found = re.search(r"lacks ([0-9.]+) GiB in (actor.)?generate_sequences, on each of 8 devices", refuse(problem))
    assert found
    machine = problem.cluster.machine
    for part, fits in ((1.01, True), (0.99, False)):
        memory = machine.gpu.memory_bytes + int(part * float(found.group(1)) * 2**30 / 0.9)
        larger = dataclasses.replace(machine, gpu=dataclasses.replace(machine.gpu, memory_bytes=memory))
        assert is_feasible(*problem._replace(cluster=ClusterSpec(machines=(larger,)))) == fits


def test_only_changes_that_are_enough_are_named(paper_problem: Build) -> None:
    problem = paper_problem("ppo", "llama-2-13b", 8)
    text = refuse(problem)
    assert "lower the batch" in text and "raise max_generation_waves" in text and "host_memory_bytes" in text
    assert "micro_batch_tokens" not in text and "largest_generation" not in text
    small = dataclasses.replace(problem.workload, micro_batch_tokens=1, largest_generation=None)
    assert not is_feasible(*problem._replace(workload=small))
    waves = dataclasses.replace(problem.workload, max_generation_waves=1024)
    assert is_feasible(*problem._replace(workload=waves))


def test_a_batch_that_replicas_cannot_share_is_named(paper_problem: Build) -> None:
    """1009 is prime: one replica generates all, or as many as there are prompts."""
    problem = paper_problem("grpo", "llama-2-70b", 128)
    prime = problem._replace(workload=dataclasses.replace(problem.workload, global_batch=1009, mini_batches=1))
    text = refuse(prime)
    assert "choose a batch that more replicas share evenly, such as 1024 prompts" in text
    assert "lower the batch" not in text
    assert "No number of such machines up to 2048 devices would do. Any one of these changes makes some" in text
    even = dataclasses.replace(prime.workload, global_batch=1024)
    assert is_feasible(*prime._replace(workload=even))


def test_no_setting_is_named_where_none_is_enough(paper_problem: Build) -> None:
    problem = paper_problem("ppo", "llama-2-7b", 8)
    small = ClusterSpec(machines=(MachineSpec(gpu=gpu("rtx-4090"), num_gpus=8),))
    text = refuse(problem._replace(cluster=small))
    assert text.endswith("No setting alone is enough. Use more or larger devices, or smaller models")


@pytest.mark.filterwarnings("error")
def test_seconds_beyond_a_float_are_not_called_memory(paper_problem: Build) -> None:
    problem = paper_problem("ppo", "llama-2-7b", 8)
    frozen = GpuSpec(
        kind="frozen",
        memory_bytes=80 * 2**30,
        peak_flops_per_s={"bfloat16": 1e-300},
        memory_bandwidth_bytes_per_s=2e12,
        link_bandwidth_bytes_per_s=3e11,
        source="a test",
    )
    text = refuse(problem._replace(cluster=ClusterSpec(machines=(MachineSpec(gpu=frozen, num_gpus=8),))))
    assert "takes more seconds than a float holds" in text
