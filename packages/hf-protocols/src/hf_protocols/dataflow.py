"""The RLHF dataflow: which role's method reads and writes which columns (paper, section 3 and Figure 6)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from hf_protocols.arguments import check_all, check_columns, check_kind, check_name, show
from hf_protocols.errors import ConfigError
from hf_protocols.similar_names import find_similar

__all__ = ["CallKind", "Dataflow", "ModelCall"]

CallKind = Literal["generation", "inference", "training", "function"]
"""Kind of work of a call: the paper's three workloads, and functions without a model."""


@dataclass(frozen=True, kw_only=True)
class ModelCall:
    """One node of the dataflow: a method of a role, and the batch columns it reads and writes.

    ``kind`` is the paper's workload kind; ``"function"`` is a call without a model forward (a reward function,
    advantages). A training call updates its role's weights; it ends the iteration's data flow if it writes no columns.
    A name in ``reads`` that ends in ``?`` is a column that the call may do without.

    Raises:
        ConfigError: for a kind that does not exist, and for values of other kinds.
    """

    role: str
    method: str
    kind: CallKind
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name(ConfigError, "a call's role", self.role)
        check_name(ConfigError, "a call's method", self.method)
        if self.kind not in get_args(CallKind):
            raise ConfigError(
                f"{self.role}.{self.method}: kind={show(self.kind)}: one of {', '.join(get_args(CallKind))}"
            )
        for name in ("reads", "writes"):
            what, columns = f"{self.role}.{self.method}: {name}", getattr(self, name)
            object.__setattr__(self, name, check_columns(ConfigError, what, columns, may_lack=name == "reads"))


@dataclass(frozen=True, kw_only=True)
class Dataflow:
    """The calls of one iteration, in program order.

    Raises:
        ConfigError: if a column is written twice, or read before the call that writes it; for what are no calls.
    """

    name: str
    calls: tuple[ModelCall, ...]

    def __post_init__(self) -> None:
        check_name(ConfigError, "a dataflow's name", self.name)
        calls = check_all(ConfigError, f"dataflow {show(self.name)}: calls", self.calls, ModelCall, "ModelCalls")
        object.__setattr__(self, "calls", calls)
        written: dict[str, ModelCall] = {}
        read: dict[str, ModelCall] = {}
        for call in self.calls:
            read.update(dict.fromkeys(_columns_read(call), call))
            for column in call.writes:
                if column in read:
                    raise ConfigError(
                        f"dataflow {show(self.name)}: column {show(column)} is read by {read[column].role}."
                        f"{read[column].method} before {call.role}.{call.method} writes it: put the writer first"
                    )
                if column in written:
                    first = written[column]
                    raise ConfigError(
                        f"dataflow {show(self.name)}: column {show(column)} is written by {first.role}.{first.method} "
                        f"and by {call.role}.{call.method}: rename one"
                    )
                written[column] = call

    @classmethod
    def preset(cls, name: str) -> Dataflow:
        """``"ppo"``, ``"remax"``, ``"safe_rlhf"`` or ``"grpo"``.

        Raises:
            ConfigError: for another name, with the nearest ones.
        """
        check_kind(ConfigError, "dataflow preset", name, str, f"one of {', '.join(_PRESETS)}")
        if name not in _PRESETS:
            near = find_similar(name, _PRESETS, most=3) or list(_PRESETS)
            raise ConfigError(f"dataflow preset {show(name)} is unknown: give {' or '.join(near)}")
        return cls(name=name, calls=_PRESETS[name])

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

        For PPO: generation; the four inferences; advantages; the two updates (the paper's stages 1, 2 and 3, with
        the advantages, which it computes on the controller, as a level of their own).
        """
        return self._stages


def _columns_read(call: ModelCall) -> tuple[str, ...]:
    """The columns by name, those that may lack like the others."""
    return tuple(column.removesuffix("?") for column in call.reads)


_RESPONSE = ("response_ids", "response_mask")
_SEQUENCE = ("prompt_ids", *_RESPONSE)


def _generate(method: str = "generate_sequences", prefix: str = "") -> ModelCall:
    writes = ("response_ids", "response_mask", "rollout_logprobs", "finish_reason", "weight_version", "sample_id")
    return ModelCall(
        role="actor",
        method=method,
        kind="generation",
        reads=("row_id", "prompt_ids"),
        writes=tuple(prefix + column for column in writes),
    )


def _infer(role: str, method: str, column: str) -> ModelCall:
    return ModelCall(role=role, method=method, kind="inference", reads=_SEQUENCE, writes=(column,))


def _score(role: str, method: str, column: str, prefix: str = "") -> ModelCall:
    reads = ("prompt_ids", f"{prefix}response_ids", f"{prefix}response_mask", "answer")
    return ModelCall(role=role, method=method, kind="inference", reads=reads, writes=(column,))


def _advantages(reads: tuple[str, ...], writes: tuple[str, ...]) -> ModelCall:
    return ModelCall(
        role="advantage", method="compute_advantages", kind="function", reads=("response_mask", *reads), writes=writes
    )


def _train(role: str, method: str, *reads: str) -> ModelCall:
    return ModelCall(role=role, method=method, kind="training", reads=(*_SEQUENCE, *reads))


_OLD_LOGPROBS = _infer("actor", "compute_logprobs", "old_logprobs")
_VALUES = _infer("critic", "compute_values", "values")
_REF_LOGPROBS = _infer("reference", "compute_ref_logprobs", "ref_logprobs")
_REWARD = _score("reward", "compute_reward", "scores")
_UPDATE_CRITIC = _train("critic", "update_critic", "values", "returns")
_UPDATE_ACTOR = _train("actor", "update_actor", "old_logprobs", "advantages")

_PRESETS: dict[str, tuple[ModelCall, ...]] = {
    "ppo": (
        _generate(),
        _OLD_LOGPROBS,
        _VALUES,
        _REF_LOGPROBS,
        _REWARD,
        _advantages(("scores", "old_logprobs", "ref_logprobs", "values"), ("advantages", "returns")),
        _UPDATE_CRITIC,
        _UPDATE_ACTOR,
    ),
    "remax": (
        _generate(),
        _generate(prefix="greedy_"),
        _OLD_LOGPROBS,
        _REF_LOGPROBS,
        _REWARD,
        _score("reward", "compute_reward", "greedy_scores", prefix="greedy_"),
        _advantages(("scores", "greedy_scores", "old_logprobs", "ref_logprobs"), ("advantages",)),
        _UPDATE_ACTOR,
    ),
    "safe_rlhf": (
        _generate(),
        _OLD_LOGPROBS,
        _VALUES,
        _REF_LOGPROBS,
        _REWARD,
        _score("cost", "compute_cost", "costs"),
        _advantages(("scores", "costs", "old_logprobs", "ref_logprobs", "values"), ("advantages", "returns")),
        _UPDATE_CRITIC,
        _UPDATE_ACTOR,
    ),
    "grpo": (
        _generate(),
        _OLD_LOGPROBS,
        _REF_LOGPROBS,
        _REWARD,
        _advantages(("scores", "row_id"), ("advantages",)),
        _train("actor", "update_actor", "old_logprobs", "ref_logprobs", "advantages"),
    ),
}
