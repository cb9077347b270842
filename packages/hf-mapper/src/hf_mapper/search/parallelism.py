"""Every layout of one model on n devices of one kind, with its times and bytes.

A layout respects: tp inside a machine; heads, KV heads and MLP width divisible by tp; layers by pp; the sequences of
an update by dp; experts by ep, which divides dp; the prompts by the number of generation replicas. Generation layouts
nest in Megatron's training layouts (paper, section 5.1); FSDP, which does not partition matrices, generates with any
gen_tp inside a machine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hf_mapper._names import unknown_name
from hf_mapper.search.demand import ModelDemand
from hf_mapper.search.movement import offload_stage_s, transfer_stage_s
from hf_mapper.search.scales import SimulatorScales
from hf_mapper.simulators.generation import simulate_generation
from hf_mapper.simulators.inference import simulate_inference
from hf_mapper.simulators.layouts import read_layouts
from hf_mapper.simulators.memory import state_bytes
from hf_mapper.simulators.training import simulate_training
from hf_mapper.specs import HOST_KIND, ClusterSpec, MachineSpec, WorkloadSpec
from hf_protocols import ConfigError, GenerationSpec, ModelShape, ParallelSpec

__all__ = [
    "BACKENDS",
    "ModelOption",
    "SimulatedOptions",
    "build_options",
    "choose_backends",
    "default_backends",
    "find_device_counts",
    "generation_layouts",
    "parallel_layouts",
    "simulate_options",
    "wave_counts",
]

BACKENDS = ("fsdp", "megatron")

_AS_SIMULATED = SimulatorScales()

_Rollout = tuple[int, GenerationSpec | None, int]
"""The number of a training layout, its generation layout and the number of waves."""


@dataclass(frozen=True, kw_only=True)
class ModelOption:
    """One way to run one model on a number of devices.

    `stage_s[i]` is its time in stage i of the dataflow; `state_bytes` per rank stay, `work_bytes` is what its largest
    call adds. A pool holds the states of all its models and the work of one call at a time. An offloaded model has
    `host_bytes` per rank in host memory between its calls: these bytes count as work of the calls, and no state stays
    on the device.
    """

    parallel: ParallelSpec
    backend: str
    generation: GenerationSpec | None
    num_waves: int
    stage_s: tuple[float, ...]
    state_bytes: float
    work_bytes: float
    host_bytes: float = 0.0

    @property
    def memory_bytes(self) -> float:
        """Bytes per rank when the model is alone."""
        return self.state_bytes + self.work_bytes


def default_backends(gpu_kind: str, backends: Sequence[str] | None = None) -> tuple[str, ...]:
    """Returns the training backends to choose from: those given, else FSDP on host slots and both on accelerators.

    Raises:
        ConfigError: for an unknown name or an empty list.
    """
    if backends is None:
        return ("fsdp",) if gpu_kind == HOST_KIND else BACKENDS
    for backend in backends:
        if backend not in BACKENDS:
            raise unknown_name("backend", backend, BACKENDS)
    if not backends:
        raise ConfigError(f"backends is empty. Name one or more of {', '.join(BACKENDS)}")
    return tuple(backends)


def choose_backends(
    demand: ModelDemand, gpu_kind: str, backends: Sequence[str] | Mapping[str, Sequence[str]] | None
) -> tuple[str, ...]:
    """Returns the training backends to choose from for one model: its own, else those for all, else the defaults.

    Raises:
        ConfigError: for an unknown name or an empty list.
    """
    of_all = None if isinstance(backends, Mapping) else backends
    return default_backends(gpu_kind, of_all if demand.backends is None else demand.backends)


def find_device_counts(demand: ModelDemand, machine: MachineSpec, workload: WorkloadSpec) -> frozenset[int]:
    """Every number of devices, up to those of `machine`, that could hold a layout: pp * tp * dp that divide."""
    model = demand.model
    return frozenset(
        pp * tp * dp
        for pp in _divisors(model.num_layers)
        for tp in _tensor_sizes(model, machine)
        for dp in _divisors(_shared_rows(workload, demand.trained), machine.total_gpus)
        if pp * tp * dp <= machine.total_gpus
    )


def parallel_layouts(
    model: ModelShape,
    machine: MachineSpec,
    num_gpus: int,
    workload: WorkloadSpec,
    backends: Sequence[str],
    trained: bool,
) -> Iterator[tuple[ParallelSpec, str]]:
    """Every valid (layout, backend) of `num_gpus` ranks, pp then tp then ep ascending.

    FSDP supports pp = tp = ep = 1 only; Megatron supports that as well.
    """
    rows = _shared_rows(workload, trained)
    for pp, tp in itertools.product(_divisors(model.num_layers, num_gpus), _tensor_sizes(model, machine)):
        if num_gpus % (pp * tp) or rows % (num_gpus // (pp * tp)) or not _inside_machine(machine, num_gpus, tp):
            continue
        if pp > 1 and model.num_layers % (pp * workload.pipeline_chunks):
            continue  # interleaved stages have whole layers
        dp = num_gpus // (pp * tp)
        for ep in _divisors(math.gcd(dp, model.num_experts or 1)):
            parallel = ParallelSpec(pp_size=pp, tp_size=tp, dp_size=dp, ep_size=ep)
            for backend in backends:
                if backend == "megatron" or pp * tp * ep == 1:
                    yield parallel, backend


def generation_layouts(
    model: ModelShape, machine: MachineSpec, parallel: ParallelSpec, backend: str, workload: WorkloadSpec
) -> Iterator[GenerationSpec]:
    """Every valid generation layout on the ranks of `parallel`, gen_pp then gen_tp ascending."""
    num_gpus = parallel.world_size
    tensor_sizes = _divisors(model.num_heads, machine.num_gpus) if backend == "fsdp" else _divisors(parallel.tp_size)
    largest = workload.largest_generation
    for gen_pp in _divisors(parallel.pp_size, largest.gen_pp_size if largest else None):
        for gen_tp in tensor_sizes:
            if largest and gen_tp > largest.gen_tp_size:
                break
            heads = model.num_kv_heads % gen_tp == 0 or gen_tp % model.num_kv_heads == 0
            valid = heads and _splits(model, gen_tp) and _inside_machine(machine, num_gpus, gen_tp)
            replicas, rest = divmod(num_gpus, gen_pp * gen_tp)
            if valid and not rest and workload.global_batch % replicas == 0:
                yield GenerationSpec(gen_pp_size=gen_pp, gen_tp_size=gen_tp)


def wave_counts(workload: WorkloadSpec, num_replicas: int) -> tuple[int, ...]:
    """Numbers of rounds in which a replica may generate its sequences: powers of two, and the most that it may."""
    most = min(workload.max_generation_waves, workload.num_sequences // num_replicas)
    powers = tuple(2**power for power in range(most.bit_length()))
    return powers if most in powers else (*powers, most)


@dataclass(frozen=True, kw_only=True)
class SimulatedOptions:
    """B ways to run one model, with separate seconds for each simulator, before any factor of `SimulatorScales`.

    `ways` lack their seconds. `call_s` has the seconds `[B]` of one call of each kind and the number of such calls in
    every stage; `transfer_s` and `offload_s` `[B, stages]` are what is moved for them.
    """

    ways: tuple[ModelOption, ...]
    call_s: Mapping[str, tuple[NDArray[np.float64], tuple[int, ...]]]
    transfer_s: NDArray[np.float64]
    offload_s: NDArray[np.float64]

    @cached_property
    def memory_bytes(self) -> NDArray[np.float64]:
        """Host, state and work bytes per rank `[B, 3]`."""
        rows = [(way.host_bytes, way.state_bytes, way.work_bytes) for way in self.ways]
        return np.array(rows, dtype=np.float64).reshape(len(rows), 3)

    def stage_s(self, scales: SimulatorScales) -> NDArray[np.float64]:
        """Returns seconds `[B, stages]` of all simulators together, each times its factor."""
        parts = {
            name: np.outer(getattr(scales, name) * seconds, count) for name, (seconds, count) in self.call_s.items()
        }
        total = np.zeros_like(self.transfer_s)
        for name in ("training", "inference"):
            total += parts.get(name, 0.0)
        total += parts.get("transition", 0.0) + parts.get("generation", 0.0)
        return total + scales.transfer * self.transfer_s + scales.offload * self.offload_s


def simulate_options(
    demand: ModelDemand, cluster: ClusterSpec, num_gpus: int, workload: WorkloadSpec, backends: Sequence[str]
) -> SimulatedOptions:
    """Every way to run `demand` on `num_gpus` devices of `cluster`, which has one kind of machine.

    After each way comes the same one offloaded, where host memory takes its state.
    """
    layouts = tuple(parallel_layouts(demand.model, cluster.machine, num_gpus, workload, backends, demand.trained))
    rollouts = _list_rollouts(demand, cluster.machine, workload, layouts)
    num_stages = len(demand.calls)
    if not rollouts:
        none = np.zeros((0, num_stages))
        return SimulatedOptions(ways=(), call_s={}, transfer_s=none, offload_s=none)
    call_s, work = _simulate_calls(demand, cluster, workload, layouts, rollouts)
    sizes = read_layouts(demand.model, [parallel for parallel, _ in layouts], [backend for _, backend in layouts])
    state = sum(state_bytes(demand.model, sizes, workload, trained=demand.trained).values())
    held = np.broadcast_to(state, (len(layouts),)).tolist()
    ways: list[ModelOption] = []
    owner: list[int] = []
    swapped_s: list[tuple[float, ...]] = []
    for number, ((index, generation, waves), needed) in enumerate(zip(rollouts, work.tolist(), strict=True)):
        parallel, backend = layouts[index]
        way = ModelOption(
            parallel=parallel, backend=backend, generation=generation, num_waves=waves,
            stage_s=(), state_bytes=held[index], work_bytes=needed,
        )  # fmt: skip
        ways.append(way)
        owner.append(number)
        swapped_s.append((0.0,) * num_stages)
        if way.state_bytes <= cluster.machine.offload_bytes:
            ways.append(replace(way, state_bytes=0.0, work_bytes=way.memory_bytes, host_bytes=way.state_bytes))
            owner.append(number)
            swapped_s.append(offload_stage_s(demand, cluster, workload, way.state_bytes))
    return SimulatedOptions(
        ways=tuple(ways),
        call_s={name: (seconds[owner], demand.count(name)) for name, seconds in call_s.items()},
        transfer_s=_transfer_seconds(demand, cluster, ways),
        offload_s=np.array(swapped_s).reshape(len(ways), num_stages),
    )


def build_options(
    demand: ModelDemand,
    cluster: ClusterSpec,
    num_gpus: int,
    workload: WorkloadSpec,
    backends: Sequence[str],
    scales: SimulatorScales = _AS_SIMULATED,
) -> tuple[ModelOption, ...]:
    """Every way of `simulate_options`, with its seconds."""
    simulated = simulate_options(demand, cluster, num_gpus, workload, backends)
    seconds = simulated.stage_s(scales).tolist()
    return tuple(replace(way, stage_s=tuple(own)) for way, own in zip(simulated.ways, seconds, strict=True))


def _list_rollouts(
    demand: ModelDemand, machine: MachineSpec, workload: WorkloadSpec, layouts: Sequence[tuple[ParallelSpec, str]]
) -> list[_Rollout]:
    """Every generation layout and number of waves of each of `layouts`; nothing but itself without generation."""
    if not demand.generates:
        return [(index, None, 1) for index in range(len(layouts))]
    return [
        (index, generation, waves)
        for index, (parallel, backend) in enumerate(layouts)
        for generation in generation_layouts(demand.model, machine, parallel, backend, workload)
        for waves in wave_counts(workload, parallel.world_size // generation.replica_size)
    ]


def _simulate_calls(
    demand: ModelDemand,
    cluster: ClusterSpec,
    workload: WorkloadSpec,
    layouts: Sequence[tuple[ParallelSpec, str]],
    rollouts: Sequence[_Rollout],
) -> tuple[dict[str, NDArray[np.float64]], NDArray[np.float64]]:
    """Seconds `[B]` of a call of each kind, and largest work `[B]`, in B rollouts; a stage reshards once."""
    parallels, backends = [parallel for parallel, _ in layouts], [backend for _, backend in layouts]
    owner = [index for index, _, _ in rollouts]
    call_s, work = {}, np.zeros(len(layouts))
    if "training" in demand.kinds:
        training = simulate_training(demand.model, cluster, parallels, workload, backend=backends)
        call_s["training"], work = training.latency_s, training.memory_bytes
    if "inference" in demand.kinds:
        inference = simulate_inference(demand.model, cluster, parallels, workload, backend=backends)
        call_s["inference"], work = inference.latency_s, np.maximum(work, inference.memory_bytes)
    call_s, work = {name: seconds[owner] for name, seconds in call_s.items()}, work[owner]
    if demand.generates:
        rollout = simulate_generation(
            demand.model,
            cluster,
            [parallels[index] for index in owner],
            workload,
            generation=[generation for _, generation, _ in rollouts if generation],
            num_waves=[waves for _, _, waves in rollouts],
            backend=[backends[index] for index in owner],
        )
        call_s["transition"] = rollout.breakdown["transition_s"]
        call_s["generation"] = rollout.breakdown["prefill_s"] + rollout.breakdown["decode_s"]
        work = np.maximum(work, rollout.memory_bytes)
    return call_s, work


def _transfer_seconds(demand: ModelDemand, cluster: ClusterSpec, ways: Sequence[ModelOption]) -> NDArray[np.float64]:
    """Seconds `[B, stages]` that the rows of the model's calls take in each way."""
    moved: dict[tuple[ParallelSpec, GenerationSpec | None], tuple[float, ...]] = {}
    for way in ways:
        layout = way.parallel, way.generation
        if layout not in moved:
            moved[layout] = transfer_stage_s(demand, cluster, *layout)
    return np.array([moved[way.parallel, way.generation] for way in ways]).reshape(len(ways), len(demand.calls))


def _splits(model: ModelShape, tp: int) -> bool:
    return model.num_heads % tp == 0 and model.intermediate_size % tp == 0


def _inside_machine(machine: MachineSpec, num_gpus: int, tp: int) -> bool:
    """True if groups of `tp` consecutive ranks stay in a machine: `pack` gives whole machines and one remainder."""
    whole, rest = divmod(num_gpus, machine.num_gpus)
    return rest % tp == 0 and (whole == 0 or machine.num_gpus % tp == 0)


def _tensor_sizes(model: ModelShape, machine: MachineSpec) -> list[int]:
    """Returns tensor-parallel sizes that divide heads, KV heads and MLP evenly and stay in a machine."""
    sizes = _divisors(model.num_kv_heads, machine.num_gpus)
    return [tp for tp in sizes if _splits(model, tp)]


def _shared_rows(workload: WorkloadSpec, trained: bool) -> int:
    """The sequences that data-parallel ranks share evenly: those of an update, or of one forward pass."""
    return workload.mini_batch_sequences if trained else workload.num_sequences


def _divisors(number: int, most: int | None = None) -> list[int]:
    return [divisor for divisor in range(1, min(number, most or number) + 1) if number % divisor == 0]
