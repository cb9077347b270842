"""Roles, recipes, and what a step is given."""

from __future__ import annotations

import inspect
import keyword
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hf_algorithms.recipes._config import AlgorithmConfig
from hf_algorithms.users_code import describe_raised
from hf_protocols import BatchError, ConfigError, HybridFlowError
from hf_protocols.foreign_code import raised_as
from hf_protocols.similar_names import find_similar
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture, MetricsFuture, ObjectFuture, Worker
    from hf_engine import SamplingParams

__all__ = ["Recipe", "Role", "StepContext", "StepError", "are_numbers", "mini_batch_rows"]


_TAKEN = frozenset({"find", "groups", "having"})
"""Names that `Roles` has for itself."""
_OF_RUN = frozenset({"checkpoint", "eval", "iteration", "memory", "perf", "time"})
"""First parts of names in metrics.jsonl that the run itself writes."""


class StepError(HybridFlowError):
    """The step of a recipe raised something else than an error of this project, or did not return metrics."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """A part that a model or a function plays in an algorithm.

    Attributes:
        name: attribute of `roles` in the step; `[roles.NAME]` of the configuration overrides what is declared here.
        worker: the worker's class, or its name as `module:Class`, which is imported where it is needed.
        has_model: whether the worker holds a model on a training backend; others call functions.
        starts_from: where the weights come from: another role, or a directory. None: `model.path`.
        kwargs: more arguments of the worker's constructor.
        scored_by: role of a model whose scores, in the column `model_scores`, are added to the scores of this role's
            worker. A run has this role if the section of this role's name has `model`, such as `[reward.model]`.

    Raises:
        ConfigError: for `starts_from`, `has_model` or `kwargs` of another type.
    """

    name: str
    worker: str | type[Worker]
    has_model: bool = False
    starts_from: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    scored_by: Role | None = None

    def __post_init__(self) -> None:
        source: Any = self.starts_from
        if source is not None and not isinstance(source, str):
            raise ConfigError(
                f"role {show(self.name)}: starts_from is {show(source)}. Give a role's name, or a directory as a text"
            )
        if not isinstance(self.has_model, bool):
            raise ConfigError(f"role {show(self.name)}: has_model is {show(self.has_model)}. Give True or False")
        if not isinstance(self.kwargs, Mapping):
            raise ConfigError(
                f"role {show(self.name)}: kwargs is {show(self.kwargs)}. Give a mapping of names to values"
            )

    def load_worker(self) -> type[Worker]:
        """Returns the worker's class.

        Raises:
            ConfigError: for something else than a Worker, or a name that does not lead to one.
        """
        from hf_controller import Terminated, Worker

        label = f"worker of role {show(self.name)}: {show(self.worker)}"
        found: Any = self.worker
        if isinstance(found, str):
            module, _, name = found.partition(":")
            with raised_as(
                lambda error: ConfigError(f"{label} cannot be imported: {_describe_import(error)}"),
                also=(SystemExit,),
                but=(Terminated,),
            ):
                found = getattr(import_module(module), name)
        if not isinstance(found, type):
            raise ConfigError(f"{label} is not a class. Name a Worker")
        if not issubclass(found, Worker):
            raise ConfigError(f"{label} is not a Worker. Derive the class from hf_controller.Worker")
        return found


def _describe_import(error: BaseException) -> str:
    """The reason for which a worker cannot be imported; where its module raised, with the place there."""
    return str(error) if isinstance(error, ImportError | AttributeError | ValueError) else describe_raised(error)


def _leave(found: Any) -> None:
    """A step that no run makes writes no samples and has no ledger."""


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """The run as a step sees it.

    Attributes:
        sampling: how responses are drawn in this iteration.
        iteration: from 1; 0 while a dataflow is derived.
        state: values that live as long as the run, such as a multiplier; written by the step.
        more_prompts: returns the requested number of prompts that the iteration has not drawn yet, with group ids of
            their own. A `DataError` says that fewer are left.
        count_prompts_left: returns the number of prompts that are left; 0 while a dataflow is derived.
        pretrain_rows: returns the requested number of rows of `data.pretraining`, or else of the training set, with
            their answers as `response_ids`, for a supervised term of the loss. Texts come in blocks of
            `data.block_tokens`.
        show_samples: takes responses with what is known of them, such as advantages. The run writes some of the last
            batch that a step shows into `samples/`.
        note_generated: takes the responses to the prompts that were drawn last, for the ledger; `generate` calls it.
        note_scored: takes these responses with their scores, for the ledger; `generate_scored` calls it.
        note_trained: takes the batch whose rows the updates learn, for the ledger; `mini_batches` calls it.
        note_filtered: takes the numbers of prompts, in the order in which they were drawn, whose responses are left
            out, for the ledger.
    """

    sampling: SamplingParams
    iteration: int
    state: dict[str, Any]
    more_prompts: Callable[[int], BatchFuture]
    count_prompts_left: Callable[[], int]
    pretrain_rows: Callable[[int], BatchFuture]
    show_samples: Callable[[BatchFuture], None] = _leave
    note_generated: Callable[[BatchFuture], None] = _leave
    note_scored: Callable[[BatchFuture], None] = _leave
    note_trained: Callable[[BatchFuture], None] = _leave
    note_filtered: Callable[[Iterable[int]], None] = _leave

    @property
    def seed(self) -> int:
        """Seed of draws on the controller; it differs between values of `run.seed` and between iterations."""
        return self.sampling.seed * 1_000_003 + self.sampling.step

    def read(self, future: ObjectFuture, *, while_tracing: Any) -> Any:
        """Returns the object of a future; `while_tracing` while a dataflow is derived, where there are no values."""
        return while_tracing if self.iteration == 0 else future.result()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An algorithm: its configuration, its roles, and the program of one iteration.

    `step(roles, prompts, config, context)` calls the roles and returns its metrics, futures or numbers. The mapper
    plans for the calls of the step (`derive_dataflow`).

    Attributes:
        name: of the algorithm; equal to the default of `config.name`.
        config: class of the `[algorithm]` section.
        roles: every role that the step calls.
        step: the program of one iteration.
        played: roles that another role plays with its adapters off: by name, that role and those of its methods that
            take the calls. See `share_bases`.

    Raises:
        ConfigError: for a field of another type, two roles of one name, roles that start from one another, or a step
            that does not take four arguments.
    """

    name: str
    config: type[AlgorithmConfig]
    roles: tuple[Role, ...]
    step: Callable[[Roles, BatchFuture, Any, StepContext], Sequence[MetricsFuture | Mapping[str, float]]]
    played: Mapping[str, tuple[str, Mapping[str, str]]] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        self._check_fields()
        names = [role.name for role in self.roles]
        for name in names:
            if not str(name).isidentifier() or keyword.iskeyword(name):
                raise ConfigError(f"recipe {show(self.name)}: the role {show(name)} is not a name of Python. Rename it")
            if name in _TAKEN:
                raise ConfigError(f"recipe {show(self.name)}: roles.{name} is a method. Rename the role")
            if names.count(name) > 1:
                raise ConfigError(f"recipe {show(self.name)}: it has two roles named {show(name)}. Rename one")
        for role in self.roles:
            seen = [role.name]
            while role.starts_from in names:
                role = self.role(role.starts_from)
                if role.name in seen:
                    raise ConfigError(
                        f"recipe {show(self.name)}: the roles {', '.join(seen)} start from one another. "
                        "Let one of them start from a directory or from None"
                    )
                if not role.has_model:
                    raise ConfigError(
                        f"recipe {show(self.name)}: the role {show(seen[-1])} starts from {show(role.name)}, which "
                        "holds no model. Name a role with a model, or a directory"
                    )
                seen.append(role.name)

    def _check_fields(self) -> None:
        label, name = f"recipe {show(self.name)}", self.name
        config: Any = self.config
        roles: Any = self.roles
        if not str(name) == name or not name.strip():
            raise ConfigError(f"{label}: its name must be a text that is not empty. Give it one")
        if not isinstance(config, type) or not issubclass(config, AlgorithmConfig):
            raise ConfigError(f"{label}: config is {show(config)}. Give a subclass of AlgorithmConfig")
        if not isinstance(roles, tuple | list) or not all(isinstance(role, Role) for role in roles):
            raise ConfigError(f"{label}: roles is {show(roles)}. Give a tuple of Role(...)")
        try:
            inspect.signature(self.step).bind("roles", "prompts", "config", "context")
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{label}: step is not callable as step(roles, prompts, config, context): {error}. "
                "Let it take these four"
            ) from None

    def role(self, name: str) -> Role:
        """Returns the role of this name.

        Raises:
            ConfigError: if there is none.
        """
        for role in self.roles:
            if role.name == name:
                return role
        names = [role.name for role in self.roles]
        near = find_similar(name, names)
        hint = f". Did you mean {show(near[0])}?" if near else ""
        raise ConfigError(f"recipe {show(self.name)} has no role {show(name)}: its roles are {', '.join(names)}{hint}")

    def run_step(
        self, roles: Roles, prompts: BatchFuture, config: Any, context: StepContext
    ) -> list[MetricsFuture | Mapping[str, float]]:
        """Runs `step`, which may be a user's code, and checks what it returns.

        Raises:
            StepError: if the step raises, with the place in its code, or returns something else than metrics.
            ConfigError: for the same while a dataflow is derived: nothing has started then.
            HybridFlowError: what calls to the roles raise.
        """
        from hf_controller import Terminated

        fails = StepError if context.iteration else ConfigError
        label = f"step of recipe {show(self.name)}"
        with raised_as(
            lambda error: fails(f"{label} raised {describe_raised(error)}"), also=(SystemExit,), but=(Terminated,)
        ):
            found: Any = self.step(roles, prompts, config, context)
            metrics = list(found) if isinstance(found, Iterable) and not isinstance(found, str | Mapping) else [found]
        for each in metrics:
            if not hasattr(each, "sums") and not are_numbers(each):
                raise fails(
                    f"{label} returned {show(each)}, which is not metrics. Return a list of what calls to update_actor "
                    "and its like return, and of mappings of a name to a number"
                )
            if isinstance(each, Mapping) and (taken := [name for name in each if _is_of_run(name)]):
                raise fails(f"{label} returned a metric named {show(taken[0])}, which the run writes. Rename it")
        return [
            {name: float(value) for name, value in each.items()} if isinstance(each, Mapping) else each
            for each in metrics
        ]

    @property
    def summary(self) -> str:
        """The first paragraph of the docstring of the step's module; empty where there is none."""
        module = sys.modules.get(self.step.__module__)
        return " ".join((getattr(module, "__doc__", None) or "").partition("\n\n")[0].split())

    @property
    def scorers(self) -> dict[str, str]:
        """Names of the roles whose models score for others, by the names of these others."""
        names = {role.name for role in self.roles}
        return {
            role.name: role.scored_by.name for role in self.roles if role.scored_by and role.scored_by.name in names
        }

    def with_scorers(self, paths: Mapping[str, str]) -> Recipe:
        """Returns the recipe with the models that score for some of its roles.

        Args:
            paths: directory of each model, by the name of the role that it scores for.

        Raises:
            ConfigError: for a role that the recipe lacks, or whose worker takes no model's scores.
        """
        added = []
        for name, path in paths.items():
            scorer = next((role.scored_by for role in self.roles if role.name == name), None)
            if scorer is None:
                raise ConfigError(
                    f"{name}.model.path = {show(path)}: recipe {show(self.name)} has no role {show(name)} that takes a "
                    "model's scores. Remove the section, or declare the role with scored_by"
                )
            added.append(replace(scorer, starts_from=path))
        return replace(self, roles=(*self.roles, *added)) if added else self

    @property
    def model_roles(self) -> tuple[str, ...]:
        """Names of the roles that hold a model."""
        return tuple(role.name for role in self.roles if role.has_model)


def _is_of_run(name: str) -> bool:
    return name.partition("/")[0] in _OF_RUN


def are_numbers(metrics: object) -> bool:
    """True for a mapping of names to numbers."""
    return isinstance(metrics, Mapping) and all(
        isinstance(name, str) and isinstance(value, Real) for name, value in metrics.items()
    )


def mini_batch_rows(
    num_rows: int, num_mini_batches: int, *, epochs: int, seed: int, group_size: int = 1
) -> Iterator[list[int]]:
    """Yields global seeded row sets: every row once an epoch, independent of the number of ranks.

    There are `epochs * num_mini_batches` lists of whole groups, whose sizes differ by at most one group.

    Args:
        num_rows: of the batch.
        num_mini_batches: in an epoch.
        epochs: passes over the batch.
        seed: of the order.
        group_size: rows, one after another, that stay together.

    Raises:
        BatchError: if the rows are not whole groups, or fewer groups than mini-batches.
    """
    num_groups, rest = divmod(num_rows, group_size)
    if rest:
        raise BatchError(
            f"a batch of {num_rows} rows is not whole groups of {group_size} responses to a prompt, which its "
            "mini-batches must hold. Keep or drop all responses to a prompt"
        )
    if num_groups < num_mini_batches:
        raise BatchError(
            f"algorithm.mini_batches = {num_mini_batches}: a batch of {num_groups} "
            f"{'rows' if group_size == 1 else 'groups'} has fewer. Lower it"
        )
    order = random.Random(seed)
    for _ in range(epochs):
        groups = list(range(num_groups))
        order.shuffle(groups)
        for part in range(num_mini_batches):
            chosen = sorted(groups[part::num_mini_batches])
            yield [group * group_size + sample for group in chosen for sample in range(group_size)]
