"""Facts that a search starts from: accelerators, machines, clusters, workloads. Units are in the names."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from hf_mapper._catalogue import CATALOGUE
from hf_mapper._names import unknown_name
from hf_mapper.adapters import AdapterSpec
from hf_mapper.constants import find_plan_efficiency
from hf_mapper.efficiency import EfficiencySpec
from hf_mapper.software import SoftwareSpec
from hf_protocols import ConfigError, GenerationSpec
from hf_protocols.validation import show

__all__ = [
    "HOST_KIND",
    "SHIPPED_GENERATION",
    "ClusterSpec",
    "GpuSpec",
    "MachineSpec",
    "Recompute",
    "WorkloadSpec",
    "gpu",
    "host_gpu",
    "known_gpus",
]

HOST_KIND = "cpu"
"""The GPU kind of a host's process slots, which have no accelerator."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Recompute = Literal["none", "selective", "full"]


def _check_positive(owner: str, **figures: object) -> None:
    for name, figure in figures.items():
        if not isinstance(figure, int | float) or not 0 < figure <= sys.float_info.max:
            raise ConfigError(f"{owner}: {name}={show(figure)} must be above 0")


_MOST = 10**9
"""Upper limit of every count here."""


def _check_counts(owner: str, **counts: object) -> None:
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            raise ConfigError(f"{owner}: {name}={show(count)} must be a whole number of at least 1")
        if count > _MOST:
            raise ConfigError(f"{owner}: {name}={show(count)} must be at most {_MOST:,}")


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """One kind of accelerator, or one slot of a host (kind `"cpu"`).

    `peak_flops_per_s` is dense and by dtype; `link_bandwidth_bytes_per_s` is one direction to the other devices of
    the machine, `host_bandwidth_bytes_per_s` one direction to the memory of its host; `reserved_bytes` is what the
    runtime holds before any model (context, communicators).

    Raises:
        ConfigError: for an empty kind or a figure that is not positive.
    """

    kind: str
    memory_bytes: int
    peak_flops_per_s: Mapping[str, float] = field(hash=False)
    memory_bandwidth_bytes_per_s: float
    link_bandwidth_bytes_per_s: float
    source: str
    host_bandwidth_bytes_per_s: float = 32e9
    reserved_bytes: int = 2**30
    efficiency: EfficiencySpec = field(default_factory=EfficiencySpec)

    def __post_init__(self) -> None:
        if not self.kind:
            raise ConfigError("a GpuSpec needs a kind, such as 'h100'")
        _check_positive(
            f"gpu {self.kind}",
            memory_bytes=self.memory_bytes,
            memory_bandwidth_bytes_per_s=self.memory_bandwidth_bytes_per_s,
            link_bandwidth_bytes_per_s=self.link_bandwidth_bytes_per_s,
            host_bandwidth_bytes_per_s=self.host_bandwidth_bytes_per_s,
            **{f"peak_flops_per_s[{dtype}]": peak for dtype, peak in self.peak_flops_per_s.items()},
        )
        if not 0 <= self.reserved_bytes < self.memory_bytes:
            raise ConfigError(
                f"gpu {self.kind}: reserved_bytes={self.reserved_bytes} must be below memory_bytes={self.memory_bytes}"
            )

    @property
    def usable_bytes(self) -> float:
        """Bytes that models may fill: memory less the runtime's own, less the fragmentation allowance."""
        return (self.memory_bytes - self.reserved_bytes) * (1 - self.efficiency.fragmentation)

    def peak(self, dtype: str) -> float:
        """Returns peak FLOP/s at `dtype`.

        Raises:
            ConfigError: if no figure is published for this accelerator and dtype.
        """
        try:
            return self.peak_flops_per_s[dtype]
        except KeyError:
            known = ", ".join(sorted(self.peak_flops_per_s))
            raise ConfigError(f"gpu {self.kind} has no peak for dtype {show(dtype)}; known: {known}") from None


def gpu(kind: str) -> GpuSpec:
    """Returns an accelerator of the catalogue by name, such as `"h100"`, with the shipped constants where it has some.

    Raises:
        ConfigError: for an unknown name, with the nearest known ones.
    """
    if kind not in CATALOGUE:
        raise unknown_name("gpu", kind, CATALOGUE)
    return GpuSpec(kind=kind, efficiency=find_plan_efficiency(kind), **CATALOGUE[kind])


def known_gpus() -> tuple[str, ...]:
    """Returns the names that `gpu` knows, sorted."""
    return tuple(sorted(CATALOGUE))


def host_gpu(
    *,
    memory_bytes: int,
    peak_flops_per_s: float = 5e10,
    memory_bandwidth_bytes_per_s: float = 1e10,
    link_bandwidth_bytes_per_s: float = 2e9,
    reserved_bytes: int = 0,
) -> GpuSpec:
    """Returns one process slot of a host as a "GPU" of kind `"cpu"`; defaults are those of an ordinary core.

    Raises:
        ConfigError: for a figure that is not positive.
    """
    return GpuSpec(
        kind=HOST_KIND,
        memory_bytes=memory_bytes,
        peak_flops_per_s=dict.fromkeys(DTYPE_BYTES, peak_flops_per_s),
        memory_bandwidth_bytes_per_s=memory_bandwidth_bytes_per_s,
        link_bandwidth_bytes_per_s=link_bandwidth_bytes_per_s,
        source="the caller",
        host_bandwidth_bytes_per_s=memory_bandwidth_bytes_per_s,
        reserved_bytes=reserved_bytes,
        efficiency=EfficiencySpec(training_latency_s=3e-4, layer_latency_s=3e-4),
    )


@dataclass(frozen=True, kw_only=True)
class MachineSpec:
    """`num_machines` equal machines of `num_gpus` accelerators each.

    `intra_bandwidth_bytes_per_s` is one direction per accelerator; the accelerator's own link where it is not given.
    `intra_latency_s` is one hop of a collective inside the machine.
    `host_memory_bytes` is the part of one machine's own memory for offloaded models, divided evenly over its
    accelerators; with 0, models are not offloaded.

    Raises:
        ConfigError: for a count below 1 or a figure that is not positive.
    """

    gpu: GpuSpec
    num_gpus: int
    num_machines: int = 1
    intra_bandwidth_bytes_per_s: float | None = None
    intra_latency_s: float = 1.25e-5
    host_memory_bytes: int = 0

    def __post_init__(self) -> None:
        owner = f"machine of {self.gpu.kind}"
        _check_counts(owner, num_gpus=self.num_gpus, num_machines=self.num_machines)
        if self.intra_bandwidth_bytes_per_s is not None:
            _check_positive(owner, intra_bandwidth_bytes_per_s=self.intra_bandwidth_bytes_per_s)
        _check_positive(owner, intra_latency_s=self.intra_latency_s)
        if type(self.host_memory_bytes) is not int or self.host_memory_bytes < 0:
            raise ConfigError(
                f"{owner}: host_memory_bytes={show(self.host_memory_bytes)} must be a whole number of at least 0"
            )

    @property
    def link_bandwidth_bytes_per_s(self) -> float:
        """Bandwidth between two accelerators of one machine, one direction."""
        given = self.intra_bandwidth_bytes_per_s
        return self.gpu.link_bandwidth_bytes_per_s if given is None else given

    @property
    def offload_bytes(self) -> float:
        """Host memory for offloaded models of one accelerator; a host slot has no other memory."""
        return 0.0 if self.gpu.kind == HOST_KIND else self.host_memory_bytes / self.num_gpus

    @property
    def total_gpus(self) -> int:
        """Accelerators of all the machines together."""
        return self.num_gpus * self.num_machines


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Machines of one kind or several, and the network between them.

    `inter_bandwidth_bytes_per_s` is one machine's bandwidth in one direction, over all its network cards;
    two or more machines need it. `link_efficiency` is the part of any link that collectives reach.

    Raises:
        ConfigError: for no machine, a missing network, or a figure that is not positive.
    """

    machines: tuple[MachineSpec, ...]
    inter_bandwidth_bytes_per_s: float | None = None
    inter_latency_s: float = 1e-5
    link_efficiency: float = 0.71

    def __post_init__(self) -> None:
        object.__setattr__(self, "machines", tuple(self.machines))
        if not self.machines:
            raise ConfigError("a cluster needs at least one machine")
        count = sum(machine.num_machines for machine in self.machines)
        if self.inter_bandwidth_bytes_per_s is None and count > 1:
            raise ConfigError(f"a cluster of {count} machines needs inter_bandwidth_bytes_per_s, per machine, one way")
        if self.inter_bandwidth_bytes_per_s is not None:
            _check_positive("cluster", inter_bandwidth_bytes_per_s=self.inter_bandwidth_bytes_per_s)
        _check_positive("cluster", inter_latency_s=self.inter_latency_s, link_efficiency=self.link_efficiency)
        if self.link_efficiency > 1:
            raise ConfigError(f"cluster: link_efficiency={show(self.link_efficiency)} is a part of a peak: at most 1")

    @classmethod
    def host(cls, slots: int, memory_bytes: int) -> ClusterSpec:
        """Returns this host as a cluster: `slots` processes with `memory_bytes` each, of kind `"cpu"`."""
        return cls(
            machines=(MachineSpec(gpu=host_gpu(memory_bytes=memory_bytes), num_gpus=slots, intra_latency_s=1e-4),)
        )

    @property
    def machine(self) -> MachineSpec:
        """The only kind of machine: simulators work on clusters of one kind (see `only`).

        Raises:
            ConfigError: when there are several kinds.
        """
        if len(self.machines) != 1:
            kinds = ", ".join(machine.gpu.kind for machine in self.machines)
            raise ConfigError(
                f"this cluster has several kinds of machine ({kinds}). Choose one with cluster.only(index)"
            )
        return self.machines[0]

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each of `machines`: its GPU's kind, with a number if several share it: `a100-80#2`."""
        kinds = [machine.gpu.kind for machine in self.machines]
        return tuple(
            kind if kinds.count(kind) == 1 else f"{kind}#{kinds[: index + 1].count(kind)}"
            for index, kind in enumerate(kinds)
        )

    @property
    def num_gpus(self) -> int:
        """Accelerators of the whole cluster."""
        return sum(machine.total_gpus for machine in self.machines)

    def only(self, index: int) -> ClusterSpec:
        """Returns the part of the cluster with the machines of `machines[index]`; a single machine has no network."""
        network = self.inter_bandwidth_bytes_per_s
        if sum(machine.num_machines for machine in self.machines) == 1:
            network = None
        return replace(self, machines=(self.machines[index],), inter_bandwidth_bytes_per_s=network)


SHIPPED_GENERATION = GenerationSpec(gen_pp_size=1, gen_tp_size=64)
"""The largest sizes of a generation replica that an engine of hf-engine runs: vLLM's."""


@dataclass(frozen=True, kw_only=True)
class WorkloadSpec:
    """One iteration of the dataflow.

    `global_batch` counts prompts; each gets `samples_per_prompt` responses, and the sequences are trained on
    `epochs` times, in `mini_batches` updates each time. `prompt_tokens` and `response_tokens` are the lengths
    of every sequence, or the largest ones where `prompt_lengths` or `response_lengths` say how they vary: equally
    likely lengths, such as quantiles or a sample.
    `micro_batch_tokens` bounds the tokens of one forward pass on one rank (always at least one sequence).
    `largest_generation` bounds the sizes of a generation replica: by default at what the shipped engines run, without
    pipeline stages (vLLM; SGLang 8 ways at most). Set larger sizes, or None for any, for an engine of your own.
    `max_generation_waves`: a layout whose KV cache is so small that a batch needs more rounds is out of memory.
    `pipeline_chunks` is the number of model chunks of each pipeline stage: above 1 the schedule is interleaved.
    `recompute`: activations that backward computes again: all layers (full), attention or half of the multiplications
    (selective), or nothing (none). `software`: the training stack. `adapters`: adapters that are trained in place
    of the weights.

    Raises:
        ConfigError: for a count below 1, or mini-batches that do not divide the sequences.
    """

    global_batch: int
    prompt_tokens: int
    response_tokens: int
    samples_per_prompt: int = 1
    epochs: int = 1
    mini_batches: int = 1
    dtype: str = "bfloat16"
    recompute: Recompute = "full"
    micro_batch_tokens: int = 8192
    max_generation_waves: int = 16
    largest_generation: GenerationSpec | None = SHIPPED_GENERATION
    pipeline_chunks: int = 1
    software: SoftwareSpec = field(default_factory=SoftwareSpec)
    adapters: AdapterSpec | None = None
    prompt_lengths: tuple[int, ...] = ()
    response_lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        counts = (
            "global_batch", "prompt_tokens", "response_tokens", "samples_per_prompt", "epochs", "mini_batches",
            "micro_batch_tokens", "max_generation_waves", "pipeline_chunks",
        )  # fmt: skip
        _check_counts("workload", **{name: getattr(self, name) for name in counts})
        for part in ("prompt", "response"):
            lengths = tuple(getattr(self, f"{part}_lengths"))
            object.__setattr__(self, f"{part}_lengths", lengths)
            _check_counts("workload", **{f"{part}_lengths[{index}]": length for index, length in enumerate(lengths)})
            if lengths and max(lengths) != getattr(self, f"{part}_tokens"):
                raise ConfigError(
                    f"workload: {part}_tokens={getattr(self, f'{part}_tokens')} must be the largest of "
                    f"{part}_lengths, {max(lengths)}"
                )
        if self.dtype not in DTYPE_BYTES:
            raise unknown_name("workload: dtype", self.dtype, DTYPE_BYTES)
        if self.recompute not in get_args(Recompute):
            raise unknown_name("workload: recompute", self.recompute, get_args(Recompute))
        if self.num_sequences % self.mini_batches:
            raise ConfigError(
                f"workload: mini_batches={self.mini_batches} does not divide the {self.num_sequences} sequences of "
                f"global_batch={self.global_batch} x samples_per_prompt={self.samples_per_prompt}. Choose a divisor"
            )

    @property
    def num_sequences(self) -> int:
        """Sequences of one iteration."""
        return self.global_batch * self.samples_per_prompt

    @property
    def mini_batch_sequences(self) -> int:
        """Sequences of one update."""
        return self.num_sequences // self.mini_batches

    @property
    def sequence_tokens(self) -> int:
        """Tokens of one sequence, prompt and response, at most."""
        return self.prompt_tokens + self.response_tokens

    @property
    def typical(self) -> WorkloadSpec:
        """Returns the workload with mean lengths for every sequence; itself if lengths do not vary."""
        if not self.prompt_lengths and not self.response_lengths:
            return self
        prompts, responses = (
            round(sum(lengths) / len(lengths)) if lengths else fixed
            for lengths, fixed in (
                (self.prompt_lengths, self.prompt_tokens),
                (self.response_lengths, self.response_tokens),
            )
        )
        return replace(self, prompt_tokens=prompts, response_tokens=responses, prompt_lengths=(), response_lengths=())

    @property
    def element_bytes(self) -> int:
        """Bytes of one weight or activation."""
        return DTYPE_BYTES[self.dtype]
