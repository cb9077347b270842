"""Measured runs of this project: the times in a run's trace, stage by stage, against the simulators' answers.

A trace has the kind of every call (`generation`, `inference`, `training` or `function`) and of the parts of a
generation (`transition` and `generation`). Its `otherData` has what the times are compared with: `workload`, the
fields of `WorkloadSpec`; `plan`, the plan that was followed; `models`, the fields of `ModelShape` by role.

A stage's time is that of its slowest rank inside the method, summed over the calls of an iteration; the median over
iterations counts, without the first, which warms everything up.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from hf_mapper.efficiency import EfficiencySpec
from hf_mapper.measurements.calibration import fit_constants
from hf_mapper.measurements.cases import build_cluster
from hf_mapper.simulators.generation import simulate_generation
from hf_mapper.simulators.inference import simulate_inference
from hf_mapper.simulators.training import simulate_training
from hf_mapper.specs import HOST_KIND, ClusterSpec, GpuSpec, MachineSpec, WorkloadSpec, gpu, host_gpu
from hf_protocols import ConfigError, GenerationSpec, HybridFlowError, MappingPlan, ModelShape, ParallelSpec, PoolPlan
from hf_protocols.outer_files import read_json_object
from hf_protocols.validation import show

__all__ = ["StageCase", "StageError", "TraceConstants", "calibrate_traces", "read_stages", "validate_trace"]

StagePhase = Literal["transition", "generation", "inference", "training"]

_WHOLE: Mapping[str, StagePhase] = {"training": "training", "inference": "inference"}
"""Kinds of calls that are one stage each."""
_PARTS: Mapping[str, StagePhase] = {"transition": "transition", "generation": "generation"}
"""Kinds of the parts of a generation, each a stage."""

_FREE = (
    (("transition",), ("link_efficiency", "intra_latency_s")),
    (("generation",), ("generation_flops", "layer_latency_s", "memory_bandwidth", "sequence_latency_s")),
    (("training", "inference"), ("training_flops", "training_latency_s")),
)
"""Constants and the stages to which they are fitted, in order: two of the links, six of devices and software."""


@dataclass(frozen=True, kw_only=True)
class TraceConstants:
    """A device as runs have shown it, and its links: what `calibrate --trace` finds."""

    gpu: GpuSpec
    link_efficiency: float = 0.71
    intra_latency_s: float = 1.25e-5

    def to_json(self) -> str:
        """As JSON text; a mapping problem takes the same fields as the `gpu` of a machine."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> TraceConstants:
        """Reads what `to_json` wrote.

        Raises:
            ConfigError: for anything else.
        """
        try:
            body = json.loads(text)
            spec = body.pop("gpu")
            return cls(gpu=GpuSpec(**{**spec, "efficiency": EfficiencySpec(**spec["efficiency"])}), **body)
        except HybridFlowError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(f"these are not constants of calibrate --trace --output: {show(str(error))}") from error


@dataclass(frozen=True, kw_only=True)
class StageCase:
    """One stage of a run: `measured` seconds an iteration, and all that a simulator needs.

    `times`: how often an iteration calls the method on all of its rows, as ReMax generates twice.
    """

    role: str
    method: str
    phase: StagePhase
    model: ModelShape
    cluster: ClusterSpec
    parallel: ParallelSpec
    generation: GenerationSpec | None
    backend: str
    workload: WorkloadSpec
    measured: float
    times: int = 1

    @property
    def fit_group(self) -> str:
        """Each stage weighs the same in a fit."""
        return f"{self.role}.{self.method} {self.phase}"

    def predict(self) -> float:
        """Seconds that the simulator of the phase predicts for all calls of an iteration."""
        return self.times * self._predict_once()

    def _predict_once(self) -> float:
        model, cluster, workload = self.model, self.cluster, self.workload
        if self.phase == "training":
            return simulate_training(model, cluster, self.parallel, workload, backend=self.backend).latency_s
        if self.phase == "inference":
            return simulate_inference(model, cluster, self.parallel, workload, backend=self.backend).latency_s
        generation = self.generation or GenerationSpec()
        parts = simulate_generation(
            model, cluster, self.parallel, workload, generation=generation, backend=self.backend
        ).breakdown
        return parts["transition_s"] if self.phase == "transition" else parts["prefill_s"] + parts["decode_s"]

    def with_constants(self, efficiency: EfficiencySpec, **links: float) -> StageCase:
        """The same stage with other constants."""
        return replace(self, cluster=build_cluster(self.cluster, efficiency, **links))


@dataclass(frozen=True, kw_only=True)
class StageError:
    """Predicted and measured seconds of one stage; `error` is predicted / measured - 1."""

    role: str
    method: str
    phase: str
    predicted_s: float
    measured_s: float
    error: float


def validate_trace(path: Path | str, constants: TraceConstants | None = None) -> list[StageError]:
    """Returns every stage of a run in order of its calls; `path` is the run's `trace.json`.

    Args:
        path: the trace.
        constants: of the run's devices; those of the catalogue, or an ordinary core's, by default.

    Raises:
        ConfigError: for a file that is missing or no such file, or a trace without a stage.
    """
    found = []
    for case in read_stages(path, constants):
        predicted = case.predict()
        found.append(
            StageError(
                role=case.role,
                method=case.method,
                phase=case.phase,
                predicted_s=predicted,
                measured_s=case.measured,
                error=predicted / case.measured - 1,
            )
        )
    return found


def calibrate_traces(paths: Sequence[Path | str]) -> TraceConstants:
    """The constants under which the simulators are closest to the stages of some profile runs on one kind of device.

    Runs of different sizes separate fixed costs from rates; with one run alone a constant stands for both.

    Raises:
        ConfigError: as `validate_trace`, or for runs on different kinds of device.
    """
    kinds = {case.cluster.machine.gpu.kind for path in paths for case in read_stages(path)}
    if len(kinds) != 1:
        raise ConfigError(f"these runs are on {', '.join(sorted(kinds)) or 'nothing'}: calibrate one kind at a time")
    kind = kinds.pop()
    spec = _fast_core() if kind == HOST_KIND else gpu(kind)
    cases = [case for path in paths for case in read_stages(path, TraceConstants(gpu=spec))]
    efficiency, links = spec.efficiency, dict[str, float]()
    for phases, names in _FREE:
        # what one rank resharding to itself takes says nothing of links
        chosen = [case for case in cases if case.phase in phases and (case.phase != "transition" or case.predict() > 0)]
        if not chosen:
            continue
        values = fit_constants(chosen, names, steps=400)  # type: ignore[arg-type] # these cases have what a fit asks for
        own = {field.name for field in fields(EfficiencySpec)} & values.keys()
        efficiency = replace(efficiency, **{name: values[name] for name in own})
        links |= {name: value for name, value in values.items() if name not in own}
        cases = [case.with_constants(efficiency, **links) for case in cases]
    return TraceConstants(gpu=replace(spec, efficiency=efficiency, source="calibrate --trace"), **links)


def read_stages(path: Path | str, constants: TraceConstants | None = None) -> list[StageCase]:
    """Returns the stages of a run's trace, in order of their first calls.

    How often a recipe makes a call is in the estimates of the mapper's plan; 1 for a plan without estimates.

    Raises:
        ConfigError: as `validate_trace`.
    """
    path = Path(path)
    body = read_json_object(ConfigError, path)
    run = _read_run(path, body.get("otherData"))
    plan = run.plan
    try:
        stages = _measure(body.get("traceEvents", []))
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is not as a run wrote it: {error!r}") from error
    planned = Counter(name for stage in plan.estimates.stages for name in stage.calls) if plan.estimates else {}
    found = []
    for (role, method, phase), measured in stages.items():
        placed, model = plan.models.get(role), run.models.get(role)
        if placed is None or placed.train is None or model is None:
            continue  # a function
        found.append(
            StageCase(
                role=role,
                method=method,
                phase=phase,
                model=model,
                cluster=_build_cluster(path, plan.pool(placed.pool), constants),
                parallel=placed.train,
                generation=placed.generation,
                backend=placed.backend,
                workload=replace(run.workload, micro_batch_tokens=placed.micro_batch_tokens),
                measured=measured,
                times=max(1, planned.get(f"{role}.{method}", 1)),
            )
        )
    if not found:
        raise ConfigError(f"{path} has no call of a model in an iteration. Pass the trace of a run")
    return found


@dataclass(frozen=True, kw_only=True)
class _TracedRun:
    """The run of a trace: what its times are compared with."""

    workload: WorkloadSpec
    plan: MappingPlan
    models: Mapping[str, ModelShape]


def _read_run(path: Path, facts: Any) -> _TracedRun:
    if not isinstance(facts, dict) or not {"workload", "plan", "models"} <= facts.keys():
        lacking = "has no workload, plan and models of its run, as traces of this release have in otherData"
        raise ConfigError(f"{path} {lacking}. Run it again and pass its trace.json")
    try:
        plan = MappingPlan.from_json(json.dumps(facts["plan"]))
        models = {role: _read_shape(shape) for role, shape in facts["models"].items()}
        return _TracedRun(workload=WorkloadSpec(**facts["workload"]), plan=plan, models=models)
    except HybridFlowError as error:
        raise ConfigError(f"{path}, its otherData: {error}") from None
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}, its otherData, is not as a run wrote it: {error!r}") from error


def _read_shape(fields_of_shape: dict[str, Any]) -> ModelShape:
    listed = tuple((name, tuple(shape)) for name, shape in fields_of_shape.get("listed_parameters", ()))
    return ModelShape(**{**fields_of_shape, "listed_parameters": listed})


def _fast_core() -> GpuSpec:
    """More than one core and its links reach: what is fitted are parts of these figures."""
    return host_gpu(
        memory_bytes=2**34,
        peak_flops_per_s=2e11,
        memory_bandwidth_bytes_per_s=5e10,
        link_bandwidth_bytes_per_s=1e10,
    )


def _build_cluster(trace: Path, pool: PoolPlan, constants: TraceConstants | None) -> ClusterSpec:
    kind, slots = pool.machines[0].gpu_kind, max(machine.slots for machine in pool.machines)
    if constants is None:
        try:
            constants = TraceConstants(gpu=host_gpu(memory_bytes=2**34) if kind == HOST_KIND else gpu(kind))
        except ConfigError as error:
            raise ConfigError(f"{trace}, its plan: {error}") from None
    if constants.gpu.kind != kind:
        raise ConfigError(f"the constants are of {constants.gpu.kind}, the run was on {kind}: calibrate on such a run")
    return ClusterSpec(
        machines=(
            MachineSpec(
                gpu=constants.gpu,
                num_gpus=slots,
                num_machines=len(pool.machines),
                intra_latency_s=constants.intra_latency_s,
            ),
        ),
        inter_bandwidth_bytes_per_s=constants.gpu.link_bandwidth_bytes_per_s,
        link_efficiency=constants.link_efficiency,
    )


def _measure(events: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, StagePhase], float]:
    """Median seconds an iteration of every stage, in order of first calls."""
    spans = sorted((event for event in events if event.get("ph") == "X"), key=lambda event: float(event["ts"]))
    calls = [event for event in spans if "call" in event["args"] and isinstance(event["args"].get("iteration"), int)]
    longest: dict[tuple[str, str, StagePhase], dict[int, dict[Any, float]]] = {}
    for call in calls:
        role, _, method = call["name"].partition(".")
        for phase, seconds in _split(call, spans):
            if not 0 <= seconds < math.inf:
                raise ValueError(f"a call took {seconds} s")
            of_call = longest.setdefault((role, method, phase), {}).setdefault(call["args"]["iteration"], {})
            number = call["args"]["call"]
            of_call[number] = max(of_call.get(number, 0.0), seconds)
    medians = {}
    for stage, iterations in longest.items():
        kept = sorted(iterations)[1:] or list(iterations)
        medians[stage] = statistics.median(sum(iterations[iteration].values()) for iteration in kept)
    return {stage: seconds for stage, seconds in medians.items() if seconds > 0}


def _split(call: Mapping[str, Any], spans: Sequence[Mapping[str, Any]]) -> list[tuple[StagePhase, float]]:
    """The phases of one call on one rank, with their seconds; none of a function."""
    kind = call["args"]["kind"]
    if kind in _WHOLE:
        return [(_WHOLE[kind], call["args"]["compute_ms"] / 1e3)]
    if kind != "generation":
        return []
    if not 0 <= call["dur"] < math.inf:
        raise ValueError(f"a call took {call['dur']} us")
    row, begin, end = (call["pid"], call["tid"]), call["ts"], call["ts"] + call["dur"]
    return [
        (_PARTS[span["args"]["kind"]], span["dur"] / 1e6)
        for span in spans
        if "call" not in span["args"]
        and span["args"].get("kind") in _PARTS
        and (span["pid"], span["tid"]) == row
        and begin <= span["ts"] <= end
    ]
