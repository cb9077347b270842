"""Measured generation: prefill and decode apart where a table has both, else the whole of a batch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from hf_mapper.constants import find_efficiency, find_links
from hf_mapper.efficiency import EfficiencySpec
from hf_mapper.measurements.cases import Phase, build_cluster, check_precision, find_gpu, find_model_of_row
from hf_mapper.measurements.tables import MeasuredTable, Row, SkipRow, find_times, is_marked, number, whole_number
from hf_mapper.simulators.generation import simulate_generation
from hf_mapper.simulators.memory import kv_token_bytes, weight_bytes
from hf_mapper.software import EngineSpec
from hf_mapper.specs import ClusterSpec, MachineSpec, WorkloadSpec, gpu
from hf_protocols import ConfigError, GenerationSpec, ModelShape, ParallelSpec

__all__ = ["GenerationCase", "build_generation_cases"]

_ENGINES = (
    (r"turbomind|lmdeploy", EngineSpec(name="lmdeploy", one_shot_reduce=False, first_token_decodes=True)),
    (r"tensorrt", EngineSpec(name="tensorrt-llm", evicts=False)),
    (r"vllm fork|splitwise", EngineSpec(name="vllm-2023", one_shot_reduce=False)),
    (r"deepspeed-mii", EngineSpec(name="deepspeed-mii", one_shot_reduce=False)),
)
"""Engines by the text of a row. Any other engine, and one that is not named, is taken for vLLM, as plans do."""
_PHASES: tuple[Phase, ...] = ("prefill", "decode", "generation")


@dataclass(frozen=True, kw_only=True)
class GenerationCase:
    """One measured batch: seconds of its prefill, of one decode step, or of the whole.

    With `single`, the prefill is that of one sequence for any batch: the least time to a first token.
    """

    source: str
    gpu: str
    phase: Phase
    engine: EngineSpec
    sweep: str
    model: ModelShape
    cluster: ClusterSpec
    generation: GenerationSpec
    workload: WorkloadSpec
    measured: float
    single: bool = False

    @property
    def stack(self) -> str:
        """The engine's name, which its constants go by."""
        return self.engine.name

    @property
    def software(self) -> str:
        """The name of the engine that is simulated."""
        return self.engine.name

    @property
    def fit_group(self) -> str:
        """The unit that is left out or fitted as a whole: a model."""
        return self.model.name

    def predict(self) -> float:
        """Returns the simulated time. A batch above the cache runs as places become free, in fractions of rounds.

        If the engine evicts nothing, the batch runs in whole rounds: equal sequences end together.
        """
        batch, places = self.workload.num_sequences, self._places()
        if self.phase == "prefill":
            return self._prefill_s(1 if self.single else batch)
        rounds = max(1.0, batch / places) if self.engine.evicts else -(-batch // places)
        decode_s = self._rollout(min(places, math.ceil(batch / rounds)))["decode_s"]
        if self.phase == "decode":
            return decode_s / self.workload.response_tokens
        return self._prefill_s(batch) + decode_s * rounds

    def with_constants(self, efficiency: EfficiencySpec, **links: float) -> GenerationCase:
        """The same case with other constants."""
        return replace(self, cluster=build_cluster(self.cluster, efficiency, **links))

    def _prefill_s(self, sequences: int) -> float:
        if not self.engine.first_token_decodes:
            return self._rollout(sequences)["prefill_s"]
        first = replace(self.workload, response_tokens=1)
        parts = self._rollout(sequences, first)
        return parts["decode_s"] + (parts["prefill_s"] if self.workload.prompt_tokens > 1 else 0.0)

    def _rollout(self, sequences: int, workload: WorkloadSpec | None = None) -> Mapping[str, float]:
        workload = replace(workload or self.workload, global_batch=sequences)
        ranks = ParallelSpec(pp_size=self.generation.gen_pp_size, tp_size=self.generation.gen_tp_size)
        return simulate_generation(
            self.model, self.cluster, ranks, workload, generation=self.generation, engine=self.engine
        ).breakdown

    def _places(self) -> int:
        """Sequences that fit in the cache next to weights and runtime, with half of their responses or with all."""
        size = self.generation.replica_size
        spec = self.cluster.machine.gpu
        total = spec.memory_bytes * self.engine.memory_fraction - spec.reserved_bytes
        free = total - weight_bytes(self.model, self.workload) / size
        token = float(kv_token_bytes(self.model, self.generation, self.workload))
        held = self.workload.prompt_tokens + self.workload.response_tokens / (2 if self.engine.evicts else 1)
        return max(1, int(free / token / held))


def build_generation_cases(table: MeasuredTable) -> Iterator[tuple[Row, list[GenerationCase] | SkipRow]]:
    """For every row what it measured (one time or two), or why it is not used."""
    for row in table.rows:
        try:
            yield row, list(_generation_cases(row))
        except (SkipRow, ConfigError) as reason:
            yield row, reason if isinstance(reason, SkipRow) else SkipRow(f"it cannot be simulated: {reason}")


def _generation_cases(row: Row) -> Iterator[GenerationCase]:
    if is_marked(row, "suspect"):
        raise SkipRow("marked suspect")
    if number(row, "ep", 1) != 1:
        raise SkipRow("ep above 1 is not simulated")
    check_precision(row)
    batch, prompt, response = (whole_number(row, column) for column in ("batch", "input_len", "output_len"))
    model, kind, engine = find_model_of_row(row), _find_kind(row), _find_engine(row)
    if prompt + response > model.max_positions:
        raise SkipRow("input_len + output_len exceeds the model's positions")
    tp, pp = whole_number(row, "tp", 1), whole_number(row, "pp", 1)
    if whole_number(row, "n_gpus", tp * pp) != tp * pp:
        raise SkipRow("n_gpus is not tp x pp")
    spec = replace(gpu(kind), efficiency=find_efficiency(kind, engine.name))
    cluster = ClusterSpec(machines=(MachineSpec(gpu=spec, num_gpus=tp * pp),))
    base = GenerationCase(
        source=row.get("source", ""),
        gpu=row["gpu"],
        phase="generation",
        engine=engine,
        sweep=f"{model.name} on {tp * pp} {row['gpu']}, {engine.name}, batch {batch} x {prompt} + {response}",
        model=model,
        cluster=build_cluster(cluster, spec.efficiency, **find_links(kind)),
        generation=GenerationSpec(gen_pp_size=pp, gen_tp_size=tp),
        workload=WorkloadSpec(
            global_batch=batch, prompt_tokens=prompt, response_tokens=response, micro_batch_tokens=batch * prompt
        ),
        measured=0.0,
    )
    times = find_times([column for column, cell in row.items() if cell])
    if not times:
        raise SkipRow("no measured time")
    for phase in _PHASES:
        if phase in times:
            column, unit_s, least = times[phase]
            yield replace(base, phase=phase, measured=number(row, column) * unit_s, single=least and phase == "prefill")


def _find_kind(row: Row) -> str:
    """The benchmark of Argonne says A100 for boards of 40 GB."""
    kind = find_gpu(row["gpu"])
    return "a100-40" if kind == "a100-80" and "LLM-Inference-Bench" in row.get("source", "") else kind


def _find_engine(row: Row) -> EngineSpec:
    text = f"{row.get('framework', '')} {row.get('source', '')}".lower()
    return next((engine for pattern, engine in _ENGINES if re.search(pattern, text)), EngineSpec())
