"""Turns a row of a measured table into arguments of the simulators: model, cluster, layout, workload, software."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hf_mapper._catalogue import CATALOGUE
from hf_mapper._known_models import build_gpt, find_model, guess_model
from hf_mapper.constants import find_efficiency, find_family, find_links
from hf_mapper.efficiency import EfficiencySpec
from hf_mapper.measurements.tables import MeasuredTable, Row, SkipRow, is_marked, number, whole_number
from hf_mapper.simulators import estimate_memory, simulate_training
from hf_mapper.simulators.layouts import check_layouts, read_layouts
from hf_mapper.software import FSDP, LLM_FOUNDRY, MEGATRON_2021, MEGATRON_DEEPSPEED, ZERO_2021, SoftwareSpec
from hf_mapper.specs import ClusterSpec, GpuSpec, MachineSpec, Recompute, WorkloadSpec, gpu
from hf_protocols import ConfigError, ModelShape, ParallelSpec, TopologyError

__all__ = [
    "Phase",
    "TrainingCase",
    "build_cluster",
    "build_training_cases",
    "check_precision",
    "find_gpu",
    "find_model_of_row",
    "find_network",
    "predict_steps",
]

Phase = Literal["training", "memory", "prefill", "decode", "generation", "communication"]

_NETWORK = {"a100": 200e9, "h100": 400e9, "h200": 400e9, "b200": 400e9}
"""Bytes per second of a machine of eight where the row does not state it: eight cards of 200 or 400 Gbit/s."""
_MACHINE = 8
_MEMORY = ("mem_gb", "param_opt_gib", "activation_gib")
_RECOMPUTE: dict[str, Recompute] = {
    **dict.fromkeys(("", "none", "no", "n", "off", "nan", "false", "0"), "none"),
    "selective": "selective",
    **dict.fromkeys(("full", "true", "yes", "y", "on", "1"), "full"),
}
"""The first word of what tables write."""
_WATTS = {"a100": 400, "h100": 700, "h200": 700, "b200": 1000}
"""Power of the boards in the catalogue, by their datasheets."""


@dataclass(frozen=True, kw_only=True)
class TrainingCase:
    """One measured step (seconds) or one measured rank (bytes): the arguments of the simulators, and what was measured.

    `part` names a part of a rank's bytes, the column param_opt_gib or activation_gib; it is empty for all bytes that
    the rank held.

    `sweep` names the runs of one model on as many GPUs with the same batch; `stack` the software's constants.
    """

    source: str
    gpu: str
    phase: Phase
    stack: str
    sweep: str
    model: ModelShape
    cluster: ClusterSpec
    parallel: ParallelSpec
    workload: WorkloadSpec
    backend: str
    measured: float
    part: str = ""

    @property
    def software(self) -> str:
        """The name of the software that is simulated."""
        return self.workload.software.name

    @property
    def fit_group(self) -> str:
        """The unit that is left out or fitted as a whole: a sweep's model."""
        return self.model.name

    def predict(self) -> float:
        """Returns the simulated seconds of the step, or bytes of the fullest rank."""
        if self.phase == "training":
            return simulate_training(
                self.model, self.cluster, self.parallel, self.workload, backend=self.backend
            ).latency_s
        need = estimate_memory(
            self.model, self.cluster, self.parallel, self.workload, calls=("training",), backend=self.backend
        )
        if self.part == "activation_gib":
            return need.breakdown["activation_bytes"]
        if self.part == "param_opt_gib":
            return sum(need.breakdown[name] for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes"))
        spec = self.cluster.machine.gpu
        return need.memory_bytes / (1 - spec.efficiency.fragmentation) + spec.reserved_bytes

    def with_constants(self, efficiency: EfficiencySpec, **links: float) -> TrainingCase:
        """The same case with other constants."""
        return replace(self, cluster=build_cluster(self.cluster, efficiency, **links))


def predict_steps(cases: Sequence[TrainingCase]) -> NDArray[np.float64]:
    """Returns the simulated seconds `[B]` of measured steps: one simulation for the layouts of one model and workload.

    Cases share a simulation where they share the `cluster` object.
    """
    groups: dict[tuple[ModelShape, int, WorkloadSpec], list[int]] = {}
    for index, case in enumerate(cases):
        groups.setdefault((case.model, id(case.cluster), case.workload), []).append(index)
    predicted = np.empty(len(cases))
    for (model, _, workload), members in groups.items():
        layouts = [cases[index].parallel for index in members]
        backends = [cases[index].backend for index in members]
        cluster = cases[members[0]].cluster
        predicted[members] = simulate_training(model, cluster, layouts, workload, backend=backends).latency_s
    return predicted


def build_cluster(cluster: ClusterSpec, efficiency: EfficiencySpec, **links: float) -> ClusterSpec:
    """`cluster` with other constants: of its GPUs, and any of its three of links."""
    machine = replace(cluster.machine, gpu=replace(cluster.machine.gpu, efficiency=efficiency))
    if "intra_latency_s" in links:
        machine = replace(machine, intra_latency_s=links["intra_latency_s"])
    rest = {name: value for name, value in links.items() if name != "intra_latency_s"}
    return replace(cluster, machines=(machine,), **rest)


def find_gpu(name: str) -> str:
    """The catalogue's name of a GPU as tables write it.

    Raises:
        SkipRow: if the catalogue does not have the GPU.
    """
    plain = re.sub(r"[\s_(),/]+", "-", re.sub(r"^\d+\s*x\s*", "", name.strip().lower()))
    plain = re.sub(r"(?<=\d)(sxm|pcie|nvl)", r"-\1", plain)
    if "pcap" in plain:
        raise SkipRow("a power-capped GPU is not in the catalogue")
    if re.search(r"(^|-)(pcie|nvl)", plain) and "4090" not in plain and "l40s" not in plain:
        raise SkipRow(f"gpu {name} is not in the catalogue, whose boards have NVLink")
    if re.search(r"(^|-)a100(-|$)", plain):
        return "a100-40" if re.search(r"-40(-?gi?b?)?(-|$)", plain) else "a100-80"
    for kind in CATALOGUE:
        if re.search(rf"(^|-){kind.replace('-', '-?')}(-|$)", plain):
            return kind
    raise SkipRow(f"gpu {name} is not in the catalogue")


def find_model_of_row(row: Row) -> ModelShape:
    """The row's model: by layers, hidden and heads, else by its name, else one of `params_b` billion parameters.

    Raises:
        SkipRow: where the row has none of them.
    """
    name = row.get("model") or _describe_sizes(row)
    try:
        if row.get("layers") and row.get("hidden") and row.get("heads"):
            sizes = [whole_number(row, column) for column in ("layers", "hidden", "heads")]
            vocabulary = whole_number(row, "vocab") if row.get("vocab") else None
            return build_gpt(name, num_layers=sizes[0], hidden_size=sizes[1], num_heads=sizes[2], vocab_size=vocabulary)
        known = find_model(name)
        return known or guess_model(name, 1e9 * number(row, "params_b"))
    except ConfigError as error:
        raise SkipRow(f"the model's sizes cannot be used: {error}") from None


def _describe_sizes(row: Row) -> str:
    """Returns a name for a model without one, so that rows of different models are distinguished."""
    sizes = [f"{column} {row[column]}" for column in ("layers", "hidden", "heads") if row.get(column)]
    return " ".join(sizes) if len(sizes) == len(("layers", "hidden", "heads")) else f"{row.get('params_b', '')}B"


def build_training_cases(table: MeasuredTable) -> Iterator[tuple[Row, list[TrainingCase] | SkipRow]]:
    """For every row what it measured (a time, bytes, or both), or why it is not used."""
    for row in table.rows:
        try:
            yield row, list(_training_cases(row))
        except (SkipRow, ConfigError, TopologyError) as reason:
            yield row, reason if isinstance(reason, SkipRow) else SkipRow(f"it cannot be simulated: {reason}")


def _training_cases(row: Row) -> Iterator[TrainingCase]:
    _check_simulated(row)
    kind, num_gpus, length = find_gpu(row["gpu"]), whole_number(row, "n_gpus"), whole_number(row, "seq_len")
    if length < 2:
        raise SkipRow("seq_len is below 2")
    parallel = _find_layout(row, num_gpus)
    batch = whole_number(row, "global_batch", parallel.dp_size)
    if batch % parallel.dp_size:
        raise SkipRow("dp does not divide global_batch")
    micro_batch = _find_micro_batch(row, batch // parallel.dp_size)
    stack, software, backend = _find_software(row, parallel)
    recompute = _find_recompute(row)
    workload = WorkloadSpec(
        global_batch=batch,
        prompt_tokens=length // 2,
        response_tokens=length - length // 2,
        micro_batch_tokens=micro_batch * length,
        recompute=recompute,
        pipeline_chunks=whole_number(row, "vpp", 1),
        software=software,
    )
    model = find_model_of_row(row)
    cluster = _find_cluster(row, kind, num_gpus, stack)
    layouts = read_layouts(model, parallel, backend)
    check_layouts(model, layouts, cluster, chunks=workload.pipeline_chunks, sequences=batch)
    base = TrainingCase(
        source=row.get("source", ""),
        gpu=row["gpu"],
        phase="training",
        stack=stack,
        sweep=f"{model.name} on {num_gpus} {row['gpu']}, {software.name}, batch {batch} x {length}",
        model=model,
        cluster=cluster,
        parallel=parallel,
        workload=workload,
        backend=backend,
        measured=0.0,
    )
    if row.get("step_time_s") or not any(row.get(column) for column in _MEMORY):
        yield replace(base, measured=number(row, "step_time_s"))
    if row.get("mem_gb"):
        yield replace(base, phase="memory", measured=number(row, "mem_gb") * 2**30)
    for part in _MEMORY[1:]:
        if row.get(part):
            yield replace(base, phase="memory", part=part, measured=number(row, part) * 2**30)


def _check_simulated(row: Row) -> None:
    """Raises SkipRow for what the simulators do not know."""
    if is_marked(row, "suspect"):
        raise SkipRow("marked suspect")
    if not re.match("(pre)?train", row.get("phase", "").lower() or "train"):
        raise SkipRow(f"phase {row['phase']} is not simulated")
    if is_marked(row, "cpu_offload"):
        raise SkipRow("offload to the host is not simulated")
    check_precision(row)
    if number(row, "cp", 1) != 1:
        raise SkipRow("cp above 1 is not simulated")


def check_precision(row: Row) -> None:
    """Raises SkipRow unless the row computes in 16 bits, as all that the constants were fitted on, or does not say."""
    text = row.get("precision", "").lower()
    if re.search(r"(fp|float|int)[48]|w\d+a\d+|awq|gptq", text):
        raise SkipRow("8-bit and 4-bit precision are not simulated")
    if text and not re.search(r"(?<![a-z0-9])(b?f(p|loat)?)?16(?!\d)|half", text):
        raise SkipRow(f"precision {row['precision']} is not simulated")


def _find_layout(row: Row, num_gpus: int) -> ParallelSpec:
    pp, tp = whole_number(row, "pp", 1), whole_number(row, "tp", 1)
    dp = whole_number(row, "dp", max(1, num_gpus // (pp * tp)))
    if pp * tp * dp != num_gpus:
        raise SkipRow("pp x tp x dp is not n_gpus")
    return ParallelSpec(pp_size=pp, tp_size=tp, dp_size=dp, ep_size=whole_number(row, "ep", 1))


def _find_micro_batch(row: Row, local: int) -> int:
    """Returns the given micro-batch: the local batch without the column, one sequence for a blank cell."""
    given = ("micro_batch", 1) if "micro_batch" in row else ("local_batch", local)
    micro_batch = whole_number(row, *given)
    if local % micro_batch:
        raise SkipRow(f"{given[0]} does not divide the sequences of a data-parallel rank")
    return micro_batch


def _find_recompute(row: Row) -> Recompute:
    text = row.get("recompute", "")
    word = re.split(r"[^a-z0-9]", text.lower(), maxsplit=1)[0]
    if word not in _RECOMPUTE:
        raise SkipRow(f"recompute {text} is not known")
    return _RECOMPUTE[word]


def _find_software(row: Row, parallel: ParallelSpec) -> tuple[str, SoftwareSpec, str]:
    """(stack, its facts, backend), from the names that the row gives for framework, source and sharding."""
    text = " ".join(row.get(column, "") for column in ("framework", "source", "model", "sharding")).lower()
    whole = parallel.pp_size == parallel.tp_size == 1
    if re.search(r"zero[- _]?3|stage[- _]?3", text):
        return MEGATRON_2021.name, ZERO_2021, "fsdp"
    old = re.search(r"megatron-(lm|deepspeed|\d+b|1t)|korthikanti|vtrain", text) and "bridge" not in text
    if old:
        sequence_parallel = "sequence-parallel" in row.get("recompute", "")
        software = MEGATRON_DEEPSPEED if re.search("megatron-deepspeed|vtrain", text) else MEGATRON_2021
        return MEGATRON_2021.name, replace(software, sequence_parallel=sequence_parallel), "megatron"
    sharded = whole and not re.search("ddp|nemo|megatron", text)
    if not sharded:
        return "pytorch", SoftwareSpec(), "megatron"
    return "pytorch", LLM_FOUNDRY if "llm-foundry" in text else FSDP, "fsdp"


def _find_cluster(row: Row, kind: str, num_gpus: int, stack: str) -> ClusterSpec:
    spec = _find_board(row["gpu"], replace(gpu(kind), efficiency=find_efficiency(kind, stack)))
    machine = MachineSpec(gpu=spec, num_gpus=min(num_gpus, _MACHINE), num_machines=-(-num_gpus // _MACHINE))
    cluster = ClusterSpec(machines=(machine,), inter_bandwidth_bytes_per_s=find_network(row, kind))
    return build_cluster(cluster, spec.efficiency, **find_links(kind))


def _find_board(name: str, spec: GpuSpec) -> GpuSpec:
    """Returns the board that a table describes in addition to the GPU's name: "96GB-HBM2e (500W)".

    HBM2e has at most 3.2 Gbit/s on each of a stack's 1,024 pins, and stacks of 16 GB. Power grows with the cube of the
    clock (the voltage follows it), so a limit takes the third root of itself off the peak.
    """
    if memory := re.search(r"(\d+)\s*GB-HBM2e", name, re.IGNORECASE):
        stacks = int(memory[1]) // 16
        spec = replace(spec, memory_bytes=int(memory[1]) * 2**30, memory_bandwidth_bytes_per_s=stacks * 3.2e9 * 128)
    limit, full = re.search(r"(\d+)\s*W\b", name), _WATTS.get(find_family(spec.kind))
    if limit and full and 0 < int(limit[1]) < full:
        clock = (int(limit[1]) / full) ** (1 / 3)
        peaks = {dtype: peak * clock for dtype, peak in spec.peak_flops_per_s.items()}
        spec = replace(spec, peak_flops_per_s=peaks)
    return spec


def find_network(row: Row, kind: str) -> float:
    """A machine's network: "8x200G" or "1600 Gbps" in the row's notes or source, else the kind's usual."""
    text = f"{row.get('notes', '')} {row.get('source', '')}"
    if cards := re.search(r"(\d+)x(\d+)G\b", text):
        return int(cards[1]) * int(cards[2]) * 1e9 / 8
    if total := re.search(r"(\d+) Gbps", text):
        return int(total[1]) * 1e9 / 8
    return _NETWORK.get(find_family(kind), 200e9)
