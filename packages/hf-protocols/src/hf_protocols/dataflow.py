"""The RLHF dataflow: calls of roles' methods and the columns that they read and write (paper, section 3, Figure 6)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

from hf_protocols.errors import ConfigError
from hf_protocols.similar_names import describe_choices
from hf_protocols.validation import Checks, show

__all__ = ["CallKind", "Dataflow", "ModelCall"]

_check = Checks(ConfigError)

CallKind = Literal["generation", "inference", "training", "function"]
"""Kind of work of a call: the paper's three workloads, and functions without a model."""


@dataclass(frozen=True, kw_only=True)
class ModelCall:
    """One node of the dataflow: a method of a role, and the batch columns it reads and writes.

    `kind` is the paper's workload kind; `"function"` is a call without a model forward (a reward function,
    advantages). A training call updates its role's weights; it ends the iteration's data flow if it writes no columns.
    A name in `reads` that ends in `?` is an optional column.

    Raises:
        ConfigError: for a kind that does not exist, and for values of other kinds.
    """

    role: str
    method: str
    kind: CallKind
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check.name("a call's role", self.role)
        _check.name("a call's method", self.method)
        _check.one_of(f"{self.role}.{self.method}: kind", self.kind, get_args(CallKind))
        for name in ("reads", "writes"):
            what, columns = f"{self.role}.{self.method}: {name}", getattr(self, name)
            object.__setattr__(self, name, _check.columns(what, columns, may_lack=name == "reads"))


@dataclass(frozen=True, kw_only=True)
class Dataflow:
    """The calls of one iteration, in program order.

    Raises:
        ConfigError: if a column is written twice, or read before it is written; for values that are not calls.
    """

    name: str
    calls: tuple[ModelCall, ...]

    def __post_init__(self) -> None:
        _check.name("a dataflow's name", self.name)
        calls = _check.kinds(f"dataflow {show(self.name)}: calls", self.calls, ModelCall, "ModelCalls")
        object.__setattr__(self, "calls", calls)
        written: dict[str, ModelCall] = {}
        read: dict[str, ModelCall] = {}
        for call in self.calls:
            read.update(dict.fromkeys(_columns_read(call), call))
            for column in call.writes:
                if column in read:
                    raise ConfigError(
                        f"dataflow {show(self.name)}: column {show(column)} is read by {read[column].role}."
                        f"{read[column].method} before {call.role}.{call.method} writes it. Put the writer first"
                    )
                if column in written:
                    first = written[column]
                    raise ConfigError(
                        f"dataflow {show(self.name)}: column {show(column)} is written by {first.role}.{first.method} "
                        f"and by {call.role}.{call.method}. Rename one"
                    )
                written[column] = call

    @classmethod
    def preset(cls, name: str) -> Dataflow:
        """Returns the dataflow of a shipped algorithm at its default keys, by `algorithm.name`.

        Rewards and costs are functions there; `with_models` turns them into models. `"safe_rlhf_one_critic"` is the
        Safe-RLHF of the paper (Figure 6): one critic, where the shipped algorithm has a second one for costs.

        Raises:
            ConfigError: for another name, with the nearest ones.
        """
        _check.kind("dataflow preset", name, str, f"one of {', '.join(_PRESETS)}")
        if name not in _PRESETS:
            raise ConfigError(f"dataflow preset {show(name)} is unknown. {describe_choices(name, _PRESETS)}")
        return cls(name=name, calls=_PRESETS[name])

    def with_models(self, roles: Iterable[str]) -> Dataflow:
        """Returns the dataflow in which `roles` compute with a model: their function calls become inferences.

        Roles without a function call stay as they are; names that are not roles are ignored.

        Raises:
            ConfigError: for a string in place of a collection.
        """
        if isinstance(roles, str):
            raise ConfigError(f"with_models: roles={show(roles)} is one text. Give a list of roles")
        held = set(roles)
        calls = (
            replace(call, kind="inference") if call.kind == "function" and call.role in held else call
            for call in self.calls
        )
        return Dataflow(name=self.name, calls=tuple(calls))

    @property
    def roles(self) -> tuple[str, ...]:
        """Every role once, in order of its first call."""
        return tuple(dict.fromkeys(call.role for call in self.calls))

    @cached_property
    def _stages(self) -> tuple[tuple[ModelCall, ...], ...]:
        level_of: dict[str, int] = {}
        stages: list[list[ModelCall]] = []
        for call in self.calls:
            level = max((level_of[column] + 1 for column in _columns_read(call) if column in level_of), default=0)
            level_of.update(dict.fromkeys(call.writes, level))
            stages.extend([] for _ in range(level + 1 - len(stages)))
            stages[level].append(call)
        return tuple(map(tuple, stages))

    def stages(self) -> tuple[tuple[ModelCall, ...], ...]:
        """Calls by dependency level: a call stands one level after the last writer of what it reads.

        For PPO: generation; the three inferences and the reward; advantages; the two updates. These are the paper's
        stages 1, 2 and 3, with an additional level for the advantages, which the paper computes on the controller.
        """
        return self._stages

    def predecessors(self) -> dict[ModelCall, frozenset[ModelCall]]:
        """All calls that each call waits for: the writers of what it reads, and the predecessors of these."""
        writers: dict[str, ModelCall] = {}
        found: dict[ModelCall, frozenset[ModelCall]] = {}
        for call in self.calls:
            direct = frozenset(writers[column] for column in _columns_read(call) if column in writers)
            found[call] = direct.union(*(found[each] for each in direct))
            writers.update(dict.fromkeys(call.writes, call))
        return found


def _columns_read(call: ModelCall) -> tuple[str, ...]:
    """The columns by name; optional ones are treated like the others."""
    return tuple(column.removesuffix("?") for column in call.reads)


_RESPONSE = ("response_ids", "response_mask")
_SEQUENCE = ("prompt_ids", *_RESPONSE)


def _generate(number: str = "") -> ModelCall:
    """The generation; `number` ends the columns of a second one."""
    writes = (*_RESPONSE, "rollout_logprobs", "finish_reason", "weight_version", "sample_id")
    return ModelCall(
        role="actor",
        method="generate_sequences",
        kind="generation",
        reads=("row_id", "prompt_ids", "prompt_id"),
        writes=tuple(column + number for column in writes),
    )


def _infer(role: str, method: str, column: str, *more: str) -> ModelCall:
    return ModelCall(role=role, method=method, kind="inference", reads=(*_SEQUENCE, *more), writes=(column,))


def _score(role: str, column: str, *, number: str = "") -> ModelCall:
    reads = (
        "prompt_ids",
        f"response_ids{number}",
        "answer",
        f"sample_id{number}",
        "group_id",
        f"finish_reason{number}",
    )
    return ModelCall(role=role, method=f"compute_{role}", kind="function", reads=reads, writes=(column,))


def _estimate(reads: tuple[str, ...], *writes: str) -> ModelCall:
    reads, writes = ("response_mask", *reads), writes or ("advantages",)
    return ModelCall(role="advantage", method="compute_advantages", kind="function", reads=reads, writes=writes)


def _train_critic(role: str, *reads: str) -> ModelCall:
    return ModelCall(role=role, method="update_critic", kind="training", reads=(*_SEQUENCE, *reads))


def _train_actor(*reads: str) -> ModelCall:
    reads = (*_SEQUENCE, "weight_version", *reads)
    return ModelCall(role="actor", method="update_actor", kind="training", reads=reads)


_OLD_LOGPROBS = _infer("actor", "compute_logprobs", "old_logprobs", "rollout_logprobs", "weight_version")
_REF_LOGPROBS = _infer("reference", "compute_ref_logprobs", "ref_logprobs")
_VALUES = _infer("critic", "compute_values", "values")
_COST_VALUES = _infer("cost_critic", "compute_values", "cost_values")
_REWARD, _COST = _score("reward", "scores"), _score("cost", "costs")
_LOGPROBS = ("old_logprobs", "ref_logprobs")
_UPDATE_CRITIC = _train_critic("critic", "returns", "values")
_UPDATE = _train_actor("advantages", "old_logprobs")


def _compare_penalised(*columns: str) -> tuple[ModelCall, ...]:
    """Scores against `columns`, and a KL penalty in the token rewards."""
    return (
        _generate(),
        _REWARD,
        _OLD_LOGPROBS,
        _REF_LOGPROBS,
        _estimate(("scores", *columns, *_LOGPROBS)),
        _UPDATE,
    )


_GROUP = (_generate(), _REWARD, _estimate(("scores", "group_id")), _train_actor("advantages", "rollout_logprobs"))
"""Scores against those of a group; the one update takes old log-probs from its own forward pass."""

_PRESETS: dict[str, tuple[ModelCall, ...]] = {
    "ppo": (
        _generate(),
        _OLD_LOGPROBS,
        _VALUES,
        _REF_LOGPROBS,
        _REWARD,
        _estimate(("scores", "values", *_LOGPROBS), "advantages", "returns"),
        _UPDATE_CRITIC,
        _UPDATE,
    ),
    "remax": (
        _generate(),
        _REWARD,
        _generate("_2"),
        _score("reward", "baseline_scores", number="_2"),
        *_compare_penalised("baseline_scores")[2:],
    ),
    "safe_rlhf": (
        _generate(),
        _OLD_LOGPROBS,
        _VALUES,
        _COST_VALUES,
        _REF_LOGPROBS,
        _REWARD,
        _COST,
        _estimate(("scores", "costs", "values", "cost_values", *_LOGPROBS), "advantages", "returns", "cost_returns"),
        _UPDATE_CRITIC,
        _train_critic("cost_critic", "cost_returns", "cost_values"),
        _UPDATE,
    ),
    "safe_rlhf_one_critic": (
        _generate(),
        _OLD_LOGPROBS,
        _VALUES,
        _REF_LOGPROBS,
        _REWARD,
        _COST,
        _estimate(("scores", "costs", "values", *_LOGPROBS), "advantages", "returns"),
        _UPDATE_CRITIC,
        _UPDATE,
    ),
    "grpo": (
        _generate(),
        _REWARD,
        _REF_LOGPROBS,
        _estimate(("scores", "group_id")),
        _train_actor("advantages", "rollout_logprobs", "ref_logprobs"),
    ),
    "dr_grpo": _GROUP,
    "rloo": _compare_penalised("group_id"),
    "reinforce_pp": _compare_penalised(),
    "reinforce_pp_baseline": _compare_penalised("group_id"),
    "dapo": _GROUP,
    "gspo": _GROUP,
    "cispo": _GROUP,
    "sapo": _GROUP,
    "gmpo": _GROUP,
    "maxrl": _GROUP,
    "opo": _GROUP,
    "dppo_tv": _GROUP,
    "distillation": (
        _generate(),
        _REWARD,
        _OLD_LOGPROBS,
        _infer("teacher", "compute_teacher_logprobs", "teacher_logprobs"),
        _estimate(("old_logprobs", "teacher_logprobs")),
        _UPDATE,
    ),
    "online_dpo": (
        _generate(),
        _REWARD,
        _REF_LOGPROBS,
        _OLD_LOGPROBS,
        _estimate(("scores", "group_id", *_LOGPROBS), "preference", "partner_logratio"),
        _train_actor("preference", "partner_logratio", "ref_logprobs", "old_logprobs"),
    ),
}
