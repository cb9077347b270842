"""Program of test_two_nodes.py: the quickstart's PPO, with a small model, on two raylets.

`python two_nodes.py count DIRECTORY` spreads the groups over both and compares what each call received from the other
node with what the routes say; `python two_nodes.py lose DIRECTORY` lets the second node die in the third iteration.
Arrivals are counted where arrays enter a worker's process, in addition to the controller's own spans.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from forked_workers import forked_workers
from hf_algorithms import wiring
from hf_algorithms.commands.quickstart import prepare_quickstart
from hf_algorithms.config import Config, parse_config
from hf_algorithms.recipes import RECIPES, StepContext
from hf_algorithms.recipes.ppo import PPO, step
from hf_algorithms.roles import Roles
from hf_algorithms.run import loop
from hf_algorithms.run_directory import RunDirectory
from hf_controller import BatchFuture, Worker, WorkerContext, WorkerGroup
from hf_controller.data.columns import find_columns
from hf_protocols import (
    Collection,
    GenerationSpec,
    MachinePlan,
    MappingPlan,
    ModelPlan,
    ParallelSpec,
    PoolPlan,
    RowSelection,
    WorkerError,
    compute_held_rows,
    route,
)

MODELS = ("actor", "critic", "reference")
CONTROLLER = "controller"


def small_quickstart(directory: RunDirectory, *, address: str) -> Config:
    """The quickstart's configuration with a smaller model, fewer rows and four iterations."""
    body = prepare_quickstart(directory, iterations=4).model_dump(mode="json", exclude_none=True)
    body["run"] |= {"eval_every": 1, "max_restarts": 0}
    body["data"] |= {"max_eval_rows": 8}
    body["model"] |= {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 1}
    body["warm_start"] = {"max_steps": 2, "batch_size": 8, "eval_every": 1}
    body["rollout"]["batch_size"] = 31
    body["reward"] = {"function": "small_runs:response_length"}
    body["cluster"] |= {"address": address, "machines": 2, "gpus_per_machine": 2, "call_timeout_s": 60}
    return parse_config(body)


def spread_plan() -> MappingPlan:
    """Each role on a pool of its own: the actor's two ranks on two machines, every other role on one."""
    pools = [PoolPlan(name="actor", machines=(MachinePlan(gpu_kind="cpu", slots=1),) * 2)]
    pools += [
        PoolPlan(name=role, machines=(MachinePlan(gpu_kind="cpu", slots=1),))
        for role in ("critic", "reference", "reward", "advantage")
    ]
    models = {pool.name: ModelPlan(pool=pool.name, backend="function") for pool in pools}
    for role in MODELS:
        size = 2 if role == "actor" else 1
        models[role] = dataclasses.replace(models[role], backend="fsdp", train=ParallelSpec(dp_size=size))
    models["actor"] = dataclasses.replace(models["actor"], generation=GenerationSpec())
    return MappingPlan(pools=tuple(pools), models=models)


# ------------------------------------------------------------------------------------------ counting, in every worker


def counting(worker: type[Worker], log: Path) -> type[Worker]:
    """The worker's class, whose process writes down where it is and what reaches it from other nodes."""

    class Counting(worker):  # type: ignore[misc, valid-type]
        def __init__(self, context: WorkerContext, **kwargs: Any) -> None:
            super().__init__(context, **kwargs)
            node = ray.get_runtime_context().get_node_id()
            write_line(log / "places.jsonl", role=context.role, rank=context.rank, node=node)
            count_arrivals(log / "arrivals.jsonl", context.rank)

    return Counting


def write_line(file: Path, **fields: Any) -> None:
    with file.open("a") as out:  # one short write: lines of several processes do not mix
        out.write(json.dumps(fields) + "\n")


def count_arrivals(file: Path, rank: int) -> None:
    """Wrap this process's store: counts slices from another node, and whole shards that are not on this node yet."""
    from hf_controller.data.transport import SliceReply
    from hf_controller.executors.rank_runtime import RankRuntime
    from hf_controller.executors.ray.store import RayStore

    get, run_call = RayStore._get, RankRuntime.run
    current: list[Any] = []

    def counted_run(self: Any, call: Any) -> Any:
        current[:] = [call]
        return run_call(self, call)

    def counted_get(self: Any, references: Sequence[Any], timeout_s: float) -> list[Any]:
        worker = ray._private.worker.global_worker.core_worker
        here = [not isinstance(each, ray.ObjectRef) or worker.object_exists(each) for each in references]
        values = get(self, references, timeout_s)
        arrived = 0
        for value, is_here in zip(values, here, strict=True):
            arrays = value[1] if isinstance(value, tuple) else value
            if isinstance(value, SliceReply):
                arrived += sum(array.nbytes for array in (*value.values, *value.lengths.values()))
            elif isinstance(arrays, list) and not is_here:
                arrived += sum(array.nbytes for array in arrays)
        if arrived:
            fields = {"call": f"{current[0].role}.{current[0].method}", **current[0].labels}
            write_line(file, **fields, rank=rank, num_bytes=arrived)
        return values

    RayStore._get, RankRuntime.run = counted_get, counted_run  # type: ignore[method-assign]


# ----------------------------------------------------------------------------------------- expecting, in the controller


@dataclasses.dataclass
class NodeCall:
    """A call of an iteration that takes a batch."""

    group: WorkerGroup
    method: str
    batch: BatchFuture
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    @classmethod
    def of(cls, group: WorkerGroup, method: str, given: Sequence[Any]) -> NodeCall:
        spec = group.methods[method]
        declared = find_columns(spec, given, method)
        reads, writes = (declared or spec).reads or (), (declared or spec).writes or ()
        return cls(group, method, given[0], reads, writes)


class RecordingRoles(Roles):
    """Roles that write down the calls that take a batch."""

    calls: list[NodeCall] = []  # noqa: RUF012 - one run in this program

    def __getattr__(self, role: str) -> Any:
        return _RecordingGroup(super().__getattr__(role))


class _RecordingGroup:
    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def __getattr__(self, method: str) -> Any:
        if not callable(getattr(self._group, method)):
            return getattr(self._group, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], BatchFuture):
                RecordingRoles.calls.append(NodeCall.of(self._group, method, (*args, *kwargs.values())))
            return getattr(self._group, method)(*args, **kwargs)

        return call


@dataclasses.dataclass
class Made:
    """A call's result: which columns, which rows each rank holds, and on which node."""

    columns: tuple[str, ...]
    held: Mapping[int, RowSelection]
    nodes: Mapping[int, str]


def expect(calls: Sequence[NodeCall], nodes: Mapping[str, Mapping[int, str]]) -> Iterator[dict[str, Any]]:
    """For every call and rank the bytes that the routes bring from other nodes, and bytes of lengths at most."""
    row_bytes = measure_rows(calls[-1].batch)
    num_rows = calls[-1].batch.num_rows
    prompts = tuple(row_bytes)
    makers = dict.fromkeys(prompts, Made(prompts, {0: RowSelection.range(0, num_rows)}, {0: nodes[CONTROLLER][0]}))
    on_node: set[tuple[int, int, str]] = set()  # whole shards that are on another node already
    for call in calls:
        spec, topology = call.group.methods[call.method], call.group.topology
        wanted = spec.protocol.distribute(topology, num_rows)
        reads = list(dict.fromkeys(name.removesuffix("?") for name in call.reads))
        reads = [name for name in reads if name in makers]
        for rank, node in nodes[call.group.role].items():
            moved = lengths = once = 0
            for made in {id(makers[name]): makers[name] for name in reads}.values():
                columns = [name for name in reads if makers[name] is made]
                for piece in route(made.held, wanted).pieces[rank]:
                    if made.nodes[piece.producer] == node:
                        continue
                    held = list(made.held[piece.producer])
                    num_bytes = sum(row_bytes[name][held[local]] for name in columns for local in piece.rows)
                    whole = set(columns) == set(made.columns) and len(piece.rows) == len(held)
                    key = (id(made), piece.producer, node)
                    moved += num_bytes
                    once += 0 if whole and key in on_node else num_bytes
                    lengths += 4 * len(piece.rows) * len(columns)
                    if whole:
                        on_node.add(key)
            yield {
                "call": f"{call.group.role}.{call.method}",
                "rank": rank,
                "route": moved,
                "first": once,
                "lengths": lengths,
            }
        collected = spec.protocol.collect(topology).ranks
        if call.writes:
            held = compute_held_rows(Collection(ranks=collected), wanted, num_rows)
            made = Made(call.writes, held, nodes[call.group.role])
            makers |= dict.fromkeys(call.writes, made)


def measure_rows(batch: BatchFuture) -> dict[str, list[int]]:
    """Bytes of every row of every column."""
    table = batch.result()
    return {
        name: [row.numel() * row.element_size() for row in column.unbind()]
        for name, column in ((name, table[name]) for name in table.keys())  # noqa: SIM118 - a TensorDict iterates its rows
    }


def compare(log: Path, expected: Mapping[int, Sequence[Mapping[str, Any]]], trace: Path) -> int:
    """Hold what arrived, and the controller's own spans, against the routes; the bytes that moved."""
    arrived: dict[tuple[Any, ...], int] = {}
    for line in map(json.loads, (log / "arrivals.jsonl").read_text().splitlines()):
        key = (line.get("iteration"), line["call"], line["rank"])
        arrived[key] = arrived.get(key, 0) + line["num_bytes"]
    spans = {
        (event["args"].get("iteration"), event["name"], event["tid"]): event["args"]["remote_bytes"]
        for event in json.loads(trace.read_text())["traceEvents"]
        if "remote_bytes" in event.get("args", {})
    }
    total = 0
    for iteration, calls in expected.items():
        for each in calls:
            key = (iteration, each["call"], each["rank"])
            metadata = arrived.get(key, 0) - each["first"]
            assert 0 <= metadata <= each["lengths"], (key, each, arrived.get(key))
            assert spans[key] == each["route"], (key, each, spans[key])
            total += each["first"]
    return total


# ------------------------------------------------------------------------------------------------------------ both runs


def count(cluster: Cluster, config: Config, directory: RunDirectory) -> None:
    """Run to the end; print the bytes that moved."""
    log = directory.path.with_name("log")
    log.mkdir()
    expected: dict[int, list[dict[str, Any]]] = {}

    def recorded_step(roles: Roles, prompts: BatchFuture, config: Any, context: StepContext) -> Any:
        if context.iteration == 0:  # planned, not run
            return step(roles, prompts, config, context)
        RecordingRoles.calls.clear()
        futures = step(roles, prompts, config, context)
        places = [json.loads(line) for line in (log / "places.jsonl").read_text().splitlines()]
        nodes: dict[str, dict[int, str]] = {CONTROLLER: {0: ray.get_runtime_context().get_node_id()}}
        for place in places:
            nodes.setdefault(place["role"], {})[place["rank"]] = place["node"]
        assert len(set(nodes["actor"].values())) == 2
        assert len({nodes[role][0] for role in nodes if role not in ("actor", CONTROLLER)}) == 2
        expected[context.iteration] = list(expect(RecordingRoles.calls, nodes))
        return futures

    wiring.Roles = RecordingRoles  # type: ignore[misc]
    roles = tuple(dataclasses.replace(role, worker=counting(role.load_worker(), log)) for role in PPO.roles)
    RECIPES["ppo"] = dataclasses.replace(PPO, roles=roles, step=recorded_step)
    summary = loop.run_training(config, directory, plan=spread_plan())
    assert summary["iterations"] == len(expected) == 4
    print("moved", compare(log, expected, directory.path / "trace.json"), flush=True)


def lose(cluster: Cluster, config: Config, directory: RunDirectory) -> None:
    """Run until the second node dies, with calls under way; print the error."""
    (second,) = [node for node in cluster.list_all_nodes() if node is not cluster.head_node]

    def cut_step(roles: Roles, prompts: BatchFuture, config: Any, context: StepContext) -> Any:
        futures = step(roles, prompts, config, context)
        if context.iteration == 3:
            cluster.remove_node(second, allow_graceful=False)
        return futures

    RECIPES["ppo"] = dataclasses.replace(PPO, step=cut_step)
    try:
        loop.run_training(config, directory, plan=spread_plan())
    except WorkerError as error:
        print("lost", json.dumps([type(error).__name__, str(error)]), flush=True)


def main(what: str, path: Path) -> None:
    """Start the cluster, run, and end it."""
    node = {"num_cpus": 3, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(**node)
        print("session", cluster.head_node.get_session_dir_path(), flush=True)
        directory = RunDirectory(path, overwrite=True)
        {"count": count, "lose": lose}[what](cluster, small_quickstart(directory, address=cluster.address), directory)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with forked_workers(["hf_algorithms.workers", "hf_engine.training.fsdp", "hf_engine.rollout.transformers"]):
        main(sys.argv[1], Path(sys.argv[2]))
