"""Simulate a given placement instead of searching for one: times and bytes of every call, stage by stage.

Where layouts are not given, each pool has those with which the whole iteration is shortest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hf_mapper._names import unknown_name
from hf_mapper.search.demand import ModelDemand, build_demands, group_functions
from hf_mapper.search.frontier import find_frontier
from hf_mapper.search.movement import count_swaps, transfer_call_s
from hf_mapper.search.parallelism import BACKENDS, ModelOption, build_options, choose_backends
from hf_mapper.search.placements import PoolRequest, pack
from hf_mapper.search.planning import PoolPlacement, build_plan, find_machines
from hf_mapper.search.pools import PoolOption
from hf_mapper.simulators.estimate import Estimate
from hf_mapper.simulators.generation import simulate_generation
from hf_mapper.simulators.inference import simulate_inference
from hf_mapper.simulators.training import simulate_training
from hf_mapper.simulators.transfer import count_call_rows, simulate_offload
from hf_mapper.specs import ClusterSpec, MachineSpec, WorkloadSpec
from hf_protocols import CallKind, Dataflow, MappingPlan, ModelCall, ModelPlan, ModelShape, PlanError, SearchEstimate
from hf_protocols.validation import show

__all__ = ["CallEstimate", "PoolChoice", "Simulation", "parse_placement", "read_placement", "simulate_placement"]

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class PoolChoice:
    """Roles that share `num_gpus` devices; `layouts` are given ones, by role, others are chosen.

    `gpu_kind` is needed where the cluster has several kinds: a name of `ClusterSpec.names`. `slots` are those that a
    plan has on each machine; a pool takes whole machines and a part of one more.
    """

    roles: tuple[str, ...]
    num_gpus: int
    gpu_kind: str | None = None
    layouts: Mapping[str, ModelPlan] = field(default_factory=dict)
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CallEstimate:
    """One call of an iteration.

    `memory_bytes` per device: the states of all models of the pool and what this call adds. `breakdown`: seconds.
    """

    stage: int
    role: str
    method: str
    kind: str
    pool: str
    latency_s: float
    memory_bytes: float
    usable_bytes: float
    breakdown: Mapping[str, float]

    @property
    def excess_bytes(self) -> float:
        """Bytes per device beyond what models may fill; 0 where the call fits."""
        return max(0.0, self.memory_bytes - self.usable_bytes)


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The plan of a placement, with its estimates, and every call of a model; functions take no time here."""

    plan: MappingPlan
    calls: tuple[CallEstimate, ...]

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration."""
        return self.plan.require_estimates().iteration_s

    @property
    def overfull(self) -> tuple[CallEstimate, ...]:
        """The calls that do not fit, the worst first."""
        return tuple(
            sorted((call for call in self.calls if call.excess_bytes > 0), key=lambda call: -call.excess_bytes)
        )

    def check_memory(self) -> None:
        """Refuses a placement that does not fit.

        Raises:
            PlanError: naming every call that does not, and by how much.
        """
        if self.overfull:
            found = "; ".join(
                f"{call.role}.{call.method} on pool {call.pool} needs {call.memory_bytes / _GIB:.1f} GiB of "
                f"{call.usable_bytes / _GIB:.1f} usable: out of memory by {call.excess_bytes / _GIB:.1f} GiB in stage "
                f"{call.stage + 1}"
                for call in self.overfull
            )
            raise PlanError(f"this placement does not fit: {found}")


def parse_placement(text: str) -> tuple[PoolChoice, ...]:
    """`"actor+reference=8, critic+reward=8"`: pools, roles joined by `+`; `=8@h100` names the kind of device.

    Raises:
        PlanError: for anything else.
    """
    found = []
    for part in text.split(","):
        names, equals, size = (piece.strip() for piece in part.partition("="))
        count, at, kind = size.partition("@")
        roles = tuple(name.strip() for name in names.split("+"))
        is_count = count.isascii() and count.isdecimal() and int(count) > 0
        if not (equals and is_count and all(roles)) or bool(at) != bool(kind):
            raise PlanError(
                f"placement {show(part.strip())}. Write each pool as its roles and its number of devices, such as "
                "actor+reference=8 or critic=4@h100, and commas between pools"
            )
        found.append(PoolChoice(roles=roles, num_gpus=int(count), gpu_kind=kind or None))
    return tuple(found)


def read_placement(plan: MappingPlan) -> tuple[PoolChoice, ...]:
    """The pools of a plan that have models, with their layouts.

    Raises:
        PlanError: for a pool of several kinds of device.
    """
    found = []
    for pool in plan.pools:
        layouts = {role: plan.models[role] for role in plan.roles_of(pool.name) if plan.models[role].train}
        kinds = {machine.gpu_kind for machine in pool.machines}
        if layouts and len(kinds) > 1:
            raise PlanError(f"pool {show(pool.name)} has {' and '.join(sorted(kinds))}: a pool is of one kind")
        if layouts:
            name = find_machines(plan, pool.name, kinds.pop())
            slots = tuple(machine.slots for machine in pool.machines)
            found.append(
                PoolChoice(roles=tuple(layouts), num_gpus=pool.num_slots, gpu_kind=name, layouts=layouts, slots=slots)
            )
    return tuple(found)


def simulate_placement(
    dataflow: Dataflow,
    models: Mapping[str, ModelShape],
    cluster: ClusterSpec,
    workload: WorkloadSpec,
    pools: Sequence[PoolChoice],
    *,
    backends: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
) -> Simulation:
    """Returns times and bytes of `pools`, also if they do not fit in memory (`check_memory` refuses those).

    Raises:
        PlanError: for a role that is missing, unknown or placed twice, devices that the cluster does not have, or a
            layout that the model cannot have.
        ConfigError: as `map_dataflow`.
    """
    demands = build_demands(dataflow, models, workload, backends)
    _check_roles(demands, pools)
    requests = [_build_request(cluster, pool) for pool in pools]
    slots = pack(cluster, requests)
    if slots is None:
        wanted = " + ".join(str(pool.num_gpus) for pool in pools)
        raise PlanError(f"pools of {wanted} devices do not fit the cluster of {cluster.num_gpus}. Use fewer of them")
    rows = [
        _combine(
            [_list_options(role, demands[role], cluster, workload, pool, request, backends) for role in pool.roles],
            request,
            cluster.machines[request.machine],
        )
        for pool, request in zip(pools, requests, strict=True)
    ]
    chosen = _choose(rows)
    placed = [
        PoolPlacement(roles=pool.roles, option=option, slots=places)
        for pool, option, places in zip(pools, chosen, slots, strict=True)
    ]
    dataflow = dataflow.with_models(models)
    functions = group_functions(dataflow, models)
    plan = build_plan(dataflow, cluster, workload, pools=placed, functions=functions, search=SearchEstimate())
    given = {role: layout.micro_batch_tokens for pool in pools for role, layout in pool.layouts.items()}
    tokens = {role: given.get(role, model.micro_batch_tokens) for role, model in plan.models.items()}
    plan = replace(
        plan, models={role: replace(model, micro_batch_tokens=tokens[role]) for role, model in plan.models.items()}
    )
    calls = [call for pool in placed for call in _estimate_calls(dataflow, demands, cluster, workload, pool, plan)]
    return Simulation(plan=plan, calls=tuple(sorted(calls, key=lambda call: call.stage)))


def _check_roles(demands: Mapping[str, ModelDemand], pools: Sequence[PoolChoice]) -> None:
    placed = [role for pool in pools for role in pool.roles]
    for role in placed:
        if role not in demands:
            raise unknown_name("placement: role", role, tuple(demands))
        if placed.count(role) > 1:
            raise PlanError(f"placement: {role} is placed {placed.count(role)} times. Place it in one pool")
    if missing := [role for role in demands if role not in placed]:
        raise PlanError(f"placement: {', '.join(missing)} missing: every role with a model has a pool")


def _build_request(cluster: ClusterSpec, pool: PoolChoice) -> PoolRequest:
    kind = pool.gpu_kind
    names = [
        name
        for name, machine in zip(cluster.names, cluster.machines, strict=True)
        if kind in (None, name, machine.gpu.kind)
    ]
    if not names:
        raise unknown_name("placement: kind of device", kind or "", cluster.names)
    if len(names) > 1:
        lack = f"says {kind} alone" if kind else "names no kind of device"
        raise PlanError(f"placement: pool {'+'.join(pool.roles)} {lack}. Add @{' or @'.join(names)}")
    request = PoolRequest(machine=cluster.names.index(names[0]), num_gpus=pool.num_gpus)
    whole, rest = divmod(pool.num_gpus, most := cluster.machines[request.machine].num_gpus)
    packed = [most] * whole + [rest] * (rest > 0)
    if pool.slots and sorted(pool.slots, reverse=True) != packed:
        raise PlanError(
            f"placement: pool {'+'.join(pool.roles)} has machines with {list(pool.slots)} slots. Give it whole "
            f"machines of {most} and one with the rest, {packed}"
        )
    return request


def _list_options(
    role: str,
    demand: ModelDemand,
    cluster: ClusterSpec,
    workload: WorkloadSpec,
    pool: PoolChoice,
    request: PoolRequest,
    backends: Sequence[str] | Mapping[str, Sequence[str]] | None,
) -> list[ModelOption]:
    """The ways to run `role` on its pool; of a given layout, those that differ in rounds of generation."""
    part, given = cluster.only(request.machine), pool.layouts.get(role)
    if given is None:
        allowed = choose_backends(demand, part.machine.gpu.kind, backends)
    else:
        _check_given(role, demand, part.machine, given)
        allowed, workload = (given.backend,), replace(workload, micro_batch_tokens=given.micro_batch_tokens)
    options = [
        option
        for option in build_options(demand, part, request.num_gpus, workload, allowed)
        if given is None
        or (option.parallel, option.generation, option.host_bytes > 0) == (given.train, given.generation, given.offload)
    ]
    if not options:
        layout = f"layout {given.train}" if given else "no layout"
        layout += f" with generation {given.generation}" if given and given.generation else ""
        layout += " offloaded" if given and given.offload else ""
        verb = "cannot run" if given else "can run"
        raise PlanError(
            f"{role}: {layout} {verb} {demand.model.name} on {request.num_gpus} devices. Choose sizes that divide the "
            "heads, the layers and the sequences of an update, with tensor-parallel groups in one machine"
            + ("; offloading needs more host_memory_bytes of the machines" if given and given.offload else "")
        )
    return options


def _check_given(role: str, demand: ModelDemand, machine: MachineSpec, given: ModelPlan) -> None:
    """Refuses what no sizes can repair: an unknown backend, or a generation layout that is missing or not used."""
    if given.backend not in BACKENDS:
        raise unknown_name(f"{role}: backend", given.backend, BACKENDS)
    if given.generation and not demand.generates:
        raise PlanError(f"{role}: generation {given.generation} of a model that does not generate. Remove it")
    if demand.generates and not given.generation:
        raise PlanError(f"{role}: generation missing of a model that generates. Add a layout, such as 1-1")
    if given.backend == "fsdp" and given.train and given.train.world_size != given.train.dp_size:
        raise PlanError(
            f"{role}: layout {given.train} with fsdp, which shards over dp_size alone. Choose the backend megatron, or "
            "pp_size, tp_size and cp_size of 1"
        )
    if given.offload and not machine.offload_bytes:
        raise PlanError(
            f"{role}: offload on machines without host_memory_bytes. Set it in cluster.machines, or remove offload"
        )


def _combine(options: Sequence[Sequence[ModelOption]], request: PoolRequest, machine: MachineSpec) -> list[PoolOption]:
    """Returns a pool's combinations that fit; if none does, the one that exceeds memory least."""
    combined = [((), np.zeros(len(options[0][0].stage_s) + 3))]  # seconds per stage; host, state bytes, largest work
    for of_role in options:
        grown = []
        for (members, values), option in itertools.product(combined, of_role):
            row = values + np.array((*option.stage_s, option.host_bytes, option.state_bytes, 0.0))
            row[-1] = max(values[-1], option.work_bytes)
            if row[-3] <= machine.offload_bytes:
                grown.append(((*members, option), row))
        if not grown:
            raise PlanError(
                f"placement: the models to offload need more than the {machine.offload_bytes / _GIB:.1f} GiB of host "
                "memory for each device. Raise host_memory_bytes of the machines or offload fewer models"
            )
        combined = [grown[index] for index in find_frontier(np.array([row for _, row in grown]))]
    fitting = [(members, row) for members, row in combined if row[-2] + row[-1] <= machine.gpu.usable_bytes]
    kept = fitting or [min(combined, key=lambda entry: float(entry[1][-2] + entry[1][-1]))]
    return [
        PoolOption(
            request=request, members=members, stage_s=tuple(map(float, row[:-3])), memory_bytes=float(row[-2] + row[-1])
        )
        for members, row in kept
    ]


def _choose(options: Sequence[Sequence[PoolOption]]) -> tuple[PoolOption, ...]:
    """One option of each pool, so that the sum over stages of the slowest pool is least."""
    combined: list[tuple[tuple[PoolOption, ...], tuple[float, ...]]] = [((), ())]
    for of_pool in options:
        grown = []
        for (chosen, slowest), option in itertools.product(combined, of_pool):
            stage_s = tuple(map(max, slowest, option.stage_s)) if chosen else option.stage_s
            grown.append(((*chosen, option), stage_s))
        combined = [grown[index] for index in find_frontier(np.array([row for _, row in grown]))]
    return min(combined, key=lambda entry: math.fsum(entry[1]))[0]


def _estimate_calls(
    dataflow: Dataflow,
    demands: Mapping[str, ModelDemand],
    cluster: ClusterSpec,
    workload: WorkloadSpec,
    pool: PoolPlacement,
    plan: MappingPlan,
) -> list[CallEstimate]:
    part = cluster.only(pool.option.request.machine)
    states = sum(option.state_bytes for option in pool.option.members)
    option_of = dict(zip(pool.roles, pool.option.members, strict=True))
    found: list[CallEstimate] = []
    for number, stage in enumerate(dataflow.stages()):
        for call in stage:
            if call.role not in option_of or call.kind == "function":
                continue
            option, model = option_of[call.role], demands[call.role].model
            given = replace(workload, micro_batch_tokens=plan.models[call.role].micro_batch_tokens)
            before = [each for each in found if (each.stage, each.role, each.kind) == (number, call.role, call.kind)]
            estimate = _estimate(call.kind, model, part, option, given, resharded=bool(before))
            estimate = _add_movement(estimate, call, part, option, workload)
            found.append(
                CallEstimate(
                    stage=number,
                    role=call.role,
                    method=call.method,
                    kind=call.kind,
                    pool=plan.models[call.role].pool,
                    latency_s=estimate.latency_s,
                    memory_bytes=states + estimate.memory_bytes,
                    usable_bytes=part.machine.gpu.usable_bytes,
                    breakdown=estimate.breakdown,
                )
            )
    return found


def _estimate(
    kind: CallKind,
    model: ModelShape,
    part: ClusterSpec,
    option: ModelOption,
    workload: WorkloadSpec,
    *,
    resharded: bool,
) -> Estimate[float]:
    """One call; `resharded`: the weights are in the generation layout already, from a call of the same stage."""
    if kind == "training":
        return simulate_training(model, part, option.parallel, workload, backend=option.backend)
    if kind == "inference":
        return simulate_inference(model, part, option.parallel, workload, backend=option.backend)
    assert kind == "generation" and option.generation is not None, "functions have no model"
    whole = simulate_generation(
        model, part, option.parallel, workload,
        generation=option.generation, num_waves=option.num_waves, backend=option.backend,
    )  # fmt: skip
    if not resharded:
        return whole
    parts = {**whole.breakdown, "transition_s": 0.0}
    return replace(whole, latency_s=sum(parts.values()), breakdown=parts)


def _add_movement(
    estimate: Estimate[float], call: ModelCall, part: ClusterSpec, option: ModelOption, workload: WorkloadSpec
) -> Estimate[float]:
    """Adds to `estimate` the transfer of the call's rows and, for an offloaded model, of its state."""
    rows = count_call_rows(call, workload)
    parts = {
        **estimate.breakdown,
        "transfer_s": transfer_call_s(call.kind, rows, part, option.parallel, option.generation),
        "offload_s": simulate_offload(option.host_bytes, part, num_swaps=count_swaps(call.kind, workload)),
    }
    moved_s = parts["transfer_s"] + parts["offload_s"]
    return Estimate(
        latency_s=estimate.latency_s + moved_s, memory_bytes=estimate.memory_bytes + option.host_bytes, breakdown=parts
    )
