"""The error for models that fit nowhere on a cluster: what is missing, and which changes are enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from hf_mapper.config import MapperConfig
from hf_mapper.search.demand import build_demands
from hf_mapper.search.feasibility import MOST_GPUS, find_smallest_cluster, is_feasible
from hf_mapper.search.shortfall import find_shortfall
from hf_mapper.specs import HOST_KIND, MachineSpec, WorkloadSpec
from hf_protocols import PlanError

__all__ = ["build_infeasible_error"]

_PLENTY_BYTES = 2**60
"""Host memory that takes any model."""

_GROWTH = (1, 8, 64)
"""Factors on a batch, in the search for one that more generation replicas share evenly."""


def build_infeasible_error(problem: MapperConfig) -> PlanError:
    """Returns the error for a cluster on which nothing fits.

    It names the memory that is missing where all models share one pool, and the smallest cluster on which they fit. It
    also lists the settings that were tried: each of them alone makes the models fit on this cluster. Where no number of
    such machines is enough, each makes some number enough.
    """
    given = " + ".join(map(_describe, problem.cluster.machines))
    if _fits(problem):
        return PlanError(
            f"{problem.dataflow.name}: every placement on {given} takes more seconds than a float holds. Correct the "
            "figures of the GPUs and links, which have units in their names"
        )
    names = ", ".join(f"{role} {model.name}" for role, model in problem.models.items())
    demands = build_demands(problem.dataflow, problem.models, problem.workload, problem.backends)
    short = find_shortfall(problem, demands, [tuple(demands)])
    missing = f": with all in one pool it lacks {short.describe()}" if short and short.missing_bytes > 0 else ""
    smallest = _find_smallest(problem)
    remedies = "; ".join(_list_remedies(problem, _fits if smallest else _fits_somewhere))
    if smallest is None:
        advice = f"No number of such machines up to {MOST_GPUS} devices would do. " + (
            f"Any one of these changes makes some number enough: {remedies}"
            if remedies
            else "Use larger devices or smaller models"
        )
    else:
        advice = f"The smallest cluster that would do is {_describe(smallest)}. " + (
            f"Without more devices, any one of these changes is enough: {remedies}"
            if remedies
            else "No setting alone is enough. Use more or larger devices, or smaller models"
        )
    return PlanError(f"{problem.dataflow.name}: no placement of {names} fits the memory of {given}{missing}. {advice}")


def _find_smallest(problem: MapperConfig) -> MachineSpec | None:
    return find_smallest_cluster(
        problem.dataflow, problem.models, problem.cluster, problem.workload, backends=problem.backends
    )


def _fits_somewhere(problem: MapperConfig) -> bool:
    return _find_smallest(problem) is not None


def _fits(problem: MapperConfig) -> bool:
    return is_feasible(problem.dataflow, problem.models, problem.cluster, problem.workload, backends=problem.backends)


def _list_remedies(problem: MapperConfig, fits: Callable[[MapperConfig], bool]) -> Iterator[str]:
    """Changes of one setting after which the problem `fits`; each was tried as far as it goes."""

    def helps(workload: WorkloadSpec) -> bool:
        return fits(replace(problem, workload=workload))

    workload = problem.workload
    if helps(replace(workload, micro_batch_tokens=1)):
        yield "lower micro_batch_tokens"
    if any(helps(replace(workload, global_batch=batch)) for batch in _list_smaller_batches(workload)):
        yield "lower the batch"
    else:
        larger = (batch for batch in _list_even_batches(workload) if helps(replace(workload, global_batch=batch)))
        if (batch := next(larger, None)) is not None:
            yield f"choose a batch that more replicas share evenly, such as {batch} prompts"
    if helps(replace(workload, prompt_tokens=1, response_tokens=1, prompt_lengths=(), response_lengths=())):
        yield "lower the lengths"
    if helps(replace(workload, max_generation_waves=workload.num_sequences)):
        yield "raise max_generation_waves in a problem of hf-mapper"
    if workload.largest_generation is not None and helps(replace(workload, largest_generation=None)):
        yield f"set largest_generation above {workload.largest_generation} in a problem of hf-mapper"
    if fits(_offer_host_memory(problem)):
        yield "raise host_memory_bytes of the machines in a problem of hf-mapper, to offload models"


def _list_smaller_batches(workload: WorkloadSpec) -> Iterator[int]:
    """Half of the prompts, a quarter and so on, as long as the mini-batches divide their sequences."""
    batch = workload.global_batch
    while batch % 2 == 0 and batch // 2 * workload.samples_per_prompt % workload.mini_batches == 0:
        batch //= 2
        yield batch


def _list_even_batches(workload: WorkloadSpec) -> Iterator[int]:
    """Larger batches that many numbers of replicas divide: powers of two, times what the mini-batches need."""
    power = 2 ** (workload.global_batch - 1).bit_length()
    for factor in _GROWTH:
        even = power * factor
        batch = even * (workload.mini_batches // math.gcd(workload.mini_batches, even * workload.samples_per_prompt))
        if workload.global_batch < batch <= 2**30 // workload.samples_per_prompt:
            yield batch


def _offer_host_memory(problem: MapperConfig) -> MapperConfig:
    machines = tuple(
        machine if machine.gpu.kind == HOST_KIND else replace(machine, host_memory_bytes=_PLENTY_BYTES)
        for machine in problem.cluster.machines
    )
    return replace(problem, cluster=replace(problem.cluster, machines=machines))


def _describe(machine: MachineSpec) -> str:
    count = machine.num_machines
    return (
        f"{count} machine{'s' if count > 1 else ''} of {machine.num_gpus} x {machine.gpu.kind} "
        f"({machine.gpu.memory_bytes / 2**30:.4g} GiB each)"
    )
