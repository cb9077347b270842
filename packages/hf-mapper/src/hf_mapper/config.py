"""A mapping problem as a TOML file.

```toml
dataflow = "ppo"                    # the name of an algorithm, as in hybridflow algorithms
backends = ["fsdp", "megatron"]     # optional

[models]                            # a preset, a path to a config.json or its directory, or a table of sizes
actor = "llama-2-13b"
critic = "llama-2-13b"
reference = "llama-2-13b"
reward = { params_b = 7 }           # or layers, hidden and heads, as for a GPT

[cluster]
inter_bandwidth_bytes_per_s = 25e9  # per machine, one way

[[cluster.machines]]
gpu = "a100-80"                     # a name of the catalogue, or a table of GpuSpec's fields
num_gpus = 8
num_machines = 2
host_memory_bytes = 1_000_000_000_000   # optional: models may be offloaded into it

[workload]
global_batch = 1024
prompt_tokens = 1024                # one length, or a list of equally likely ones
response_tokens = [256, 512, 768, 1024]
mini_batches = 8
largest_generation = "2-64"         # optional: of a generation replica, pp-tp; 1-64 is what the shipped engines run
adapters = { rank = 16 }            # optional: trained in place of the weights, on a frozen base; targets = [...]
```
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from hf_mapper._known_models import build_gpt, guess_model
from hf_mapper._names import unknown_name
from hf_mapper.adapters import AdapterSpec
from hf_mapper.efficiency import EfficiencySpec
from hf_mapper.software import SoftwareSpec
from hf_mapper.specs import HOST_KIND, ClusterSpec, GpuSpec, MachineSpec, WorkloadSpec, gpu, host_gpu
from hf_protocols import ConfigError, Dataflow, GenerationSpec, ModelShape, TopologyError
from hf_protocols.paths import read_path
from hf_protocols.toml import read_toml
from hf_protocols.validation import Checks, show

__all__ = ["MapperConfig", "read_config"]

_check = Checks(ConfigError)

T = TypeVar("T")

_PLAIN_SIZES = frozenset({"params_b", "layers", "hidden", "heads"})
_ANY_LENGTH = 2**20

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    dict: "a table",
}


@dataclass(frozen=True, kw_only=True)
class MapperConfig:
    """The arguments of `map_dataflow`. A role with a model computes with it: see `Dataflow.with_models`."""

    dataflow: Dataflow
    models: Mapping[str, ModelShape]
    cluster: ClusterSpec
    workload: WorkloadSpec
    backends: Sequence[str] | Mapping[str, Sequence[str]] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataflow", self.dataflow.with_models(self.models))


def read_config(path: Path | str) -> MapperConfig:
    """Reads a mapping problem; paths in it are relative to the file.

    Raises:
        ConfigError: for a missing or malformed file, an unknown key (with the nearest), a missing key, or an invalid
            value.
    """
    path = Path(path)
    body = read_toml(path)
    known = ("dataflow", "backends", "models", "cluster", "workload")
    _check_keys(path.name, body, known, required=("dataflow", "models", "cluster", "workload"))
    if not isinstance(body["dataflow"], str):
        raise ConfigError(f"{path.name}: dataflow={show(body['dataflow'])} must be the name of a preset, such as 'ppo'")
    models = _table(body["models"], "models")
    return MapperConfig(
        dataflow=Dataflow.preset(body["dataflow"]),
        models={role: _read_model(entry, f"models.{role}", path.parent) for role, entry in models.items()},
        cluster=_read_cluster(_table(body["cluster"], "cluster")),
        workload=_read_workload(_table(body["workload"], "workload")),
        backends=_read_backends(body.get("backends")),
    )


def _read_model(entry: Any, where: str, folder: Path) -> ModelShape:
    if isinstance(entry, dict):
        if _PLAIN_SIZES & entry.keys():
            return _read_plain_sizes(entry, where)
        return _build(ModelShape, {"name": where.removeprefix("models."), **entry}, where)
    if not isinstance(entry, str):
        raise ConfigError(f"{where}={show(entry)} must be a preset's name, a path or a table of sizes")
    if entry.endswith(".json") or "/" in entry or entry.startswith(("~", ".")):
        return ModelShape.from_config(folder / read_path(where, entry))
    return ModelShape.preset(entry)


def _read_plain_sizes(entry: dict[str, Any], where: str) -> ModelShape:
    """Returns a GPT as measured tables describe it: `params_b` (billions), or `layers`, `hidden` and `heads`."""
    _check_keys(where, entry, sorted(_PLAIN_SIZES | {"vocab"}), required=())
    hints: dict[str, Any] = {**dict.fromkeys(entry, int), "params_b": float}
    _check_types(entry, hints, where)
    for key, figure in entry.items():
        if not 0 < figure < math.inf:
            raise ConfigError(f"{where}: {key}={show(figure)} must be above 0")
    name, sizes = where.removeprefix("models."), _PLAIN_SIZES - {"params_b"}
    if sizes <= entry.keys() and "params_b" not in entry:
        if entry["hidden"] % entry["heads"]:
            raise ConfigError(f"{where}: heads={entry['heads']} does not divide hidden={entry['hidden']}")
        shape = build_gpt(
            name,
            num_layers=entry["layers"],
            hidden_size=entry["hidden"],
            num_heads=entry["heads"],
            vocab_size=entry.get("vocab"),
        )
    elif entry.keys() == {"params_b"}:
        shape = guess_model(f"{name} of {entry['params_b']:g} B", 1e9 * entry["params_b"])
    else:
        raise ConfigError(f"{where}: a table of sizes has params_b alone, or layers, hidden and heads (and vocab)")
    return dataclasses.replace(shape, max_positions=_ANY_LENGTH)


def _read_cluster(table: dict[str, Any]) -> ClusterSpec:
    machines = table.get("machines")
    if not isinstance(machines, list) or not all(isinstance(machine, dict) for machine in machines):
        raise ConfigError("cluster.machines must be one [[cluster.machines]] table or more")
    return _build(ClusterSpec, {**table, "machines": tuple(map(_read_machine, machines))}, "cluster")


def _read_workload(table: dict[str, Any]) -> WorkloadSpec:
    for part in ("prompt", "response"):
        if f"{part}_lengths" in table:
            raise ConfigError(f"workload: key '{part}_lengths' is unknown. Use {part}_tokens = [100, 200]")
    if "largest_generation" in table:  # written pp-tp
        largest = table["largest_generation"]
        _check.kind("workload: largest_generation", largest, str, "sizes as pp-tp, such as '1-4'")
        try:
            table = {**table, "largest_generation": GenerationSpec.parse(largest)}
        except TopologyError as error:
            raise ConfigError(f"workload: largest_generation={show(largest)}: {error}") from None
    for part in ("prompt", "response"):
        lengths = table.get(f"{part}_tokens")
        if isinstance(lengths, list) and lengths and all(type(length) is int for length in lengths):
            table = {**table, f"{part}_tokens": max(lengths), f"{part}_lengths": tuple(lengths)}
    if "software" in table:
        software = _table(table["software"], "workload.software")
        table = {**table, "software": _build(SoftwareSpec, software, "workload.software")}
    if "adapters" in table:
        adapters = _table(table["adapters"], "workload.adapters")
        table = {**table, "adapters": _build(AdapterSpec, adapters, "workload.adapters")}
    return _build(WorkloadSpec, table, "workload")


def _read_machine(table: dict[str, Any]) -> MachineSpec:
    where = "cluster.machines"
    _check_keys(where, table, [field.name for field in dataclasses.fields(MachineSpec)], required=("gpu", "num_gpus"))
    return _build(MachineSpec, {**table, "gpu": _read_gpu(table["gpu"], f"{where}.gpu")}, where)


def _read_gpu(entry: Any, where: str) -> GpuSpec:
    if isinstance(entry, str):
        return gpu(entry)
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}={show(entry)} must be the name of a GPU, such as 'a100-80', or a table")
    table = entry
    if table.get("kind") == HOST_KIND and not isinstance(table.get("peak_flops_per_s"), dict):
        figures = {key: value for key, value in table.items() if key != "kind"}
        known = [name for name in get_type_hints(host_gpu) if name != "return"]
        _check_keys(where, figures, known, required=("memory_bytes",))
        _check_types(figures, get_type_hints(host_gpu), where)
        return host_gpu(**figures)
    if "efficiency" in table:
        efficiency = _table(table["efficiency"], f"{where}.efficiency")
        table = {**table, "efficiency": _build(EfficiencySpec, efficiency, f"{where}.efficiency")}
    return _build(GpuSpec, {"source": "the configuration", **table}, where)


def _read_backends(entry: Any) -> tuple[str, ...] | None:
    if entry is None:
        return None
    if not isinstance(entry, list) or not all(isinstance(name, str) for name in entry):
        raise ConfigError(f"backends={show(entry)} must be a list of names")
    return tuple(entry)


def _build(of: type[T], table: Mapping[str, Any], where: str) -> T:
    """Builds an `of` from a table whose keys are its fields."""
    fields = dataclasses.fields(of)  # type: ignore[arg-type]
    required = [field.name for field in fields if _is_required(field)]
    _check_keys(where, table, [field.name for field in fields], required=required)
    _check_types(table, get_type_hints(of), where)
    return of(**table)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _table(entry: Any, where: str) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}={show(entry)} must be a table")
    return entry


def _check_keys(where: str, table: Mapping[str, Any], known: list[str] | tuple[str, ...], *, required: Any) -> None:
    for key in table:
        if key not in known:
            raise unknown_name(f"{where}: key", key, known)
    missing = [key for key in required if key not in table]
    if missing:
        raise ConfigError(f"{where}: {', '.join(missing)} missing")


def _check_types(table: Mapping[str, Any], hints: Mapping[str, Any], where: str) -> None:
    """Numbers, texts, booleans and tables as annotated; the specs themselves check everything else."""
    for key, entry in table.items():
        options = get_args(hints[key]) if isinstance(hints[key], UnionType) else (hints[key],)
        wanted = next((option for option in map(_as_type, options) if option in _WORDS), None)
        if wanted is None:
            continue
        accepted = (int, float) if wanted is float else (wanted,)
        if not isinstance(entry, accepted) or (isinstance(entry, bool) and wanted is not bool):
            raise ConfigError(f"{where}: {key}={show(entry)} must be {_WORDS[wanted]}")


def _as_type(hint: Any) -> Any:
    """Returns TOML's type for an annotation: strings for literals, tables for mappings."""
    return {Literal: str, Mapping: dict}.get(get_origin(hint), hint)
