"""The dataflow of a recipe, read off one traced run of its step. Nothing is started for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING, Any

from hf_algorithms.recipes import Recipe, Role, StepContext
from hf_algorithms.roles import Roles
from hf_protocols import ConfigError, Dataflow, ModelCall
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_controller import TracedCall, TracedResult, TracingExecutor
    from hf_engine import SamplingParams

__all__ = ["PROMPT_COLUMNS", "build_tracing_context", "derive_dataflow"]

PROMPT_COLUMNS = ("row_id", "prompt_ids", "answer", "group_id", "prompt_id")
"""Columns of the prompts that a step is given."""

_RESPONSE = ("response_ids", "response_mask")

_Column = tuple["_Node | None", str]


@dataclass(eq=False, kw_only=True)
class _Node:
    """Calls that are one: parts of a batch, or the updates on its mini-batches.

    `origins` maps each name that is read to the columns it comes from (one, or several where calls were
    concatenated); `rows` has the rows of each call, by name and source.
    """

    role: str
    method: str
    call: TracedCall
    origins: dict[str, frozenset[_Column]]
    objects: tuple[_Node, ...]
    rows: list[dict[str, dict[int, frozenset[int]]]] = field(default_factory=list)

    def takes(self, other: _Node) -> bool:
        """True if `other` is a part of this call: both read the same columns, and other rows unless they train."""
        same = (self.role, self.method, self.origins, self.objects) == (
            other.role, other.method, other.origins, other.objects,
        )  # fmt: skip
        if not same or self.call.spec.kind == "training":
            return same
        (new,) = other.rows
        return bool(new) and all(any(_disjoint(rows[name], new[name]) for name in new) for rows in self.rows)


def derive_dataflow(
    recipe: Recipe,
    config: Any,
    sampling: SamplingParams,
    *,
    num_prompts: int,
    columns: Sequence[str] = PROMPT_COLUMNS,
) -> Dataflow:
    """Runs `recipe.step` once with a `TracingExecutor`; returns the calls it made, with what each reads and writes.

    Calls on parts of one batch count as one call, and so do the updates on its mini-batches. A function on which no
    other call depends (metrics) is left out, unless its role has no other calls and would have no place. A column that
    is written again has the name that it is renamed to, or a number. While the step runs every metric is 0.0: a step
    that branches on a metric takes the branch of 0.0.

    Args:
        recipe: a shipped one or your own.
        config: the recipe's configuration.
        sampling: of the generation; `n` is how many rows a prompt becomes.
        num_prompts: rows of the prompts.
        columns: of the prompts.

    Raises:
        ConfigError: for a step that calls no model, does not end, or asks for the result of a batch or an object. Also
            for a role without a worker, or whose `has_model` contradicts its worker; a method that does not declare its
            columns; or a loss that asks for an output that the model lacks.
        BatchError: for a column that a call needs and nobody wrote, or rows that do not fit.
    """
    from hf_algorithms.workers import check_call_arguments
    from hf_controller import TracingExecutor

    for role in recipe.roles:
        _check_model(recipe, role)
    executor = TracingExecutor()
    groups = {role.name: executor.build_group(role.name, role.load_worker()) for role in recipe.roles}
    prompts, context = executor.put_columns(columns, num_prompts), build_tracing_context(executor, sampling)
    recipe.run_step(Roles(groups, recipe.scorers, played=recipe.played), prompts, config, context)
    check_call_arguments(executor.calls, {role.name: role.load_worker() for role in recipe.roles})
    nodes = _merge([call for call in executor.calls if call.num_rows])
    names = _name_columns(nodes, columns)
    calls = [_describe(node, names) for node in nodes]
    if not any(call.kind != "function" for call in calls):
        raise ConfigError(
            f"step of recipe {show(recipe.name)}: it calls no role that has a model, so there is nothing to train. "
            "Call roles.actor.generate_sequences and its like"
        )
    needed = {call.role for call in calls if _is_needed(call)}
    kept = tuple(call for call in calls if _is_needed(call) or call.role not in needed)
    return Dataflow(name=recipe.name, calls=kept)


def _check_model(recipe: Recipe, role: Role) -> None:
    """Refuses a role without a model whose worker builds one, and a role with a model that its worker does not take."""
    from hf_algorithms.workers import ModelWorker
    from hf_controller import Worker

    worker = role.load_worker()
    label = f"role {show(role.name)} of recipe {show(recipe.name)}"
    if issubclass(worker, ModelWorker):
        if not role.has_model:
            raise ConfigError(
                f"{label}: its worker {worker.__name__} holds a model, and the role is declared without one. Declare "
                'the role with has_model=True, and with starts_from="actor" for the weights that the actor starts from'
            )
    elif role.has_model and not hasattr(worker, "load_state"):
        parameters = signature(worker).parameters.values()
        takes_model = any(each.name == "model" or each.kind is each.VAR_KEYWORD for each in parameters)
        if not takes_model or worker.__init__ is Worker.__init__:
            raise ConfigError(
                f"{label}: it is declared with has_model=True, and its worker {worker.__name__} takes no model. Remove "
                "has_model, or name a worker that holds a model, such as hf_algorithms.workers:ReferenceWorker"
            )


def _is_needed(call: ModelCall) -> bool:
    return bool(call.writes) or call.kind != "function"


def build_tracing_context(executor: TracingExecutor, sampling: SamplingParams) -> StepContext:
    """Returns the context of a traced step, whose further prompts are batches without values."""
    return StepContext(
        sampling=sampling,
        iteration=0,
        state={},
        more_prompts=lambda num_prompts: executor.put_columns(PROMPT_COLUMNS, num_prompts),
        pretrain_rows=lambda num_rows: executor.put_columns((*PROMPT_COLUMNS, *_RESPONSE), num_rows),
        count_prompts_left=lambda: 0,
    )


def _merge(calls: Sequence[TracedCall]) -> list[_Node]:
    node_of: dict[TracedCall, _Node] = {}
    nodes: list[_Node] = []
    for call in calls:
        made = _build_node(call, node_of)
        node = next((node for node in nodes if node.takes(made)), made)
        if node is made:
            nodes.append(node)
        else:
            node.rows += made.rows
        node_of[call] = node
    return nodes


def _build_node(call: TracedCall, node_of: Mapping[TracedCall, _Node]) -> _Node:
    origins: dict[str, frozenset[_Column]] = {}
    rows: dict[str, dict[int, frozenset[int]]] = {}
    for name, segments in call.reads.items():
        results: list[tuple[TracedResult, str]] = [(segment.source.shards[0], segment.column) for segment in segments]
        origins[name] = frozenset((node_of[result.call] if result.call else None, column) for result, column in results)
        of_name = rows.setdefault(name, {})
        for segment in segments:
            source = id(segment.source.shards[0])
            of_name[source] = of_name.get(source, frozenset()) | frozenset(segment.rows)
    objects = tuple(node_of[other] for other in call.objects)
    return _Node(role=call.role, method=call.method, call=call, origins=origins, objects=objects, rows=[rows])


def _disjoint(some: Mapping[int, frozenset[int]], other: Mapping[int, frozenset[int]]) -> bool:
    return all(rows.isdisjoint(other.get(source, ())) for source, rows in some.items())


def _name_columns(nodes: Sequence[_Node], prompts: Sequence[str]) -> dict[_Column, str]:
    """One name for every column: its own, where it is taken the one it is read under, else with a number."""
    names: dict[_Column, str] = {(None, column): column for column in prompts}
    aliases: dict[_Column, list[str]] = {}
    for node in nodes:
        for name, columns in node.origins.items():
            for column in columns:
                if column[0] is None:  # of a further batch that the step was given
                    names.setdefault(column, column[1])
                aliases.setdefault(column, []).append(name)
    taken = set(prompts)
    for node in nodes:
        for written in node.call.writes:
            numbered = (f"{written}_{number}" for number in range(2, 2 + len(nodes)))
            choices = (written, *aliases.get((node, written), ()), *numbered)
            names[node, written] = next(name for name in choices if name not in taken)
            taken.add(names[node, written])
        if any(node in other.objects for other in nodes):
            names[node, _OBJECT] = f"{node.role}.{node.method}"
    return names


_OBJECT = ""
"""Stands for the object that a call returns, which has no column."""


def _describe(node: _Node, names: Mapping[_Column, str]) -> ModelCall:
    columns = [column for name in node.origins for column in sorted(node.origins[name], key=names.__getitem__)]
    columns += [(other, _OBJECT) for other in node.objects]
    written = (*node.call.writes, _OBJECT)
    return ModelCall(
        role=node.role,
        method=node.method,
        kind=node.call.spec.kind,
        reads=tuple(dict.fromkeys(names[column] for column in columns)),
        writes=tuple(names[node, column] for column in written if (node, column) in names),
    )
