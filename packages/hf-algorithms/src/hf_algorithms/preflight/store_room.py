"""Bytes of a run's batches against the object store of its Ray cluster: said before Ray moves any of them to files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_algorithms.data import PromptDataset, TextBlocks
from hf_algorithms.preflight.row_limits import RowTokens
from hf_algorithms.preflight.walk import walk_results, walk_supervised
from hf_controller import choose_store_bytes
from hf_protocols.columns import find_column_size

if TYPE_CHECKING:
    from tensordict import TensorDict

    from hf_algorithms.config import Config
    from hf_algorithms.preflight.inputs import ModelInputs, RunInputs
    from hf_algorithms.preflight.walk import Phase
    from hf_algorithms.recipes import SupervisedDataset
    from hf_controller import TracedResult
    from hf_protocols import MappingPlan

__all__ = ["describe_store", "describe_supervised_store", "estimate_batch_bytes", "estimate_supervised_bytes"]

_KEY = "cluster.object_store_bytes"
_SPILL_PERCENT = 80
"""Of the object store: with more in it, Ray begins to move batches to files."""

_FLOAT_BYTES = 4
_LENGTH_BYTES = 4
_ROW_BYTES = {
    **dict.fromkeys(("next_values", "next_returns"), _FLOAT_BYTES),
    **dict.fromkeys(("group_id", "group_tokens"), 8),
    "prompt_id": 3 * 8,
    "sample_id": 4 * 8,
}
"""Of columns that `find_column_size` does not have, or counts as nothing."""
_CANDIDATES = ("candidate_ids", "teacher_candidate_logprobs")
_NUM_SAMPLED = 256
"""Rows of a data set whose texts are measured."""

_SIZES = {
    "warm start": ("warm_start.batch_size",),
    "iterations": ("rollout.batch_size", "rollout.samples_per_prompt", "rollout.max_new_tokens"),
    "evaluation": ("data.max_eval_rows", "rollout.max_new_tokens"),
    "divergence": ("data.max_eval_rows", "rollout.max_new_tokens"),
}
"""Keys from which the batches of a phase have their size; the first is the one to lower."""


def describe_store(config: Config, plan: MappingPlan, inputs: RunInputs, *, is_here: bool) -> list[str]:
    """Returns one line if the batches of some phase may not fit in the object store of the run's own Ray cluster.

    Args:
        config: the run's.
        plan: where the models go.
        inputs: the run's.
        is_here: whether the run is on this machine. If not, only a store whose size is given is known.

    Raises:
        ConfigError: for a size of the store that this machine does not have.
    """
    store_bytes = _find_store(config, is_here=is_here)
    if store_bytes is None:
        return []
    found = estimate_batch_bytes(config, plan, inputs)
    return _describe_largest(config, found, _SIZES, inputs, store_bytes)


def describe_supervised_store(
    config: Config,
    plan: MappingPlan,
    inputs: ModelInputs,
    *,
    train: SupervisedDataset,
    held_out: Sequence[SupervisedDataset],
    is_here: bool,
) -> list[str]:
    """Returns what `describe_store` does, for a run that learns from the rows of `train` as they are.

    Raises:
        ConfigError: as `describe_store` does.
    """
    store_bytes = _find_store(config, is_here=is_here)
    if store_bytes is None:
        return []
    lines: list[str] = []
    for exactly in (False, True):
        found = estimate_supervised_bytes(config, plan, inputs, train=train, held_out=held_out, exactly=exactly)
        of_iteration = ("data.max_eval_rows", "algorithm.batch_size")
        if 2 * found["evaluation"] < found["iterations"]:
            of_iteration = of_iteration[::-1]
        keys = {"iterations": of_iteration, **dict.fromkeys(("evaluation", "sets"), ("data.max_eval_rows",))}
        lines = _describe_largest(config, found, keys, inputs, store_bytes)
        if not lines:
            break
    return lines


def _find_store(config: Config, *, is_here: bool) -> int | None:
    """Bytes of the object store of the run's own Ray cluster, where it has one and they are known."""
    given = config.cluster.object_store_bytes
    if config.run.executor != "ray" or config.cluster.address != "local":
        return None
    return choose_store_bytes(given, key=_KEY) if is_here else given


def _describe_largest(
    config: Config, found: Mapping[str, int], keys: Mapping[str, Sequence[str]], inputs: ModelInputs, store_bytes: int
) -> list[str]:
    """Describes the phase that takes most, if the store has too little room for it; `keys` as in `_SIZES`."""
    phase = max(found, key=found.__getitem__)
    least = math.ceil(found[phase] * 100 / _SPILL_PERCENT)
    if store_bytes >= least:
        return []
    if phase in keys:
        sizes = {key: attrgetter(key)(config) for key in keys[phase]}
    else:
        sets = {_name_set(number): each for number, each in enumerate(inputs.evaluations)}
        sizes = {f"{phase}.max_new_tokens": sets[phase].max_new_tokens}
        sizes |= {key: attrgetter(key)(config) for key in keys.get("sets", ())}
    line = (
        f"{', '.join(f'{key} = {size}' for key, size in sizes.items())}: the batches take up to {_show(found[phase])}, "
        f"more than {_SPILL_PERCENT} % of the object store's {_show(store_bytes)}. Ray moves what exceeds that to "
        f"files, which is slow. Raise {_KEY} to at least {least}, or lower {next(iter(sizes))}"
    )
    return [line]


def estimate_batch_bytes(config: Config, plan: MappingPlan, inputs: RunInputs) -> dict[str, int]:
    """Returns the bytes that the batches of each phase take at most in the object store, and of each evaluation set.

    Each response has the greatest length, and no batch is freed before the phase ends. Texts are as long as in the
    data set's first rows. A column that no shipped worker returns has 4 bytes for each response token.
    """
    sets = (inputs.train, inputs.validation, inputs.test, *(each.data for each in inputs.evaluations))
    text_bytes = {data.source: _measure_texts(data) for data in sets}
    blocks = inputs.pretraining.block_tokens if isinstance(inputs.pretraining, TextBlocks) else 0
    candidates = getattr(config.algorithm, "top_k", 1)
    return _count_phases(walk_results(config, plan, inputs), text_bytes, blocks, candidates)


def estimate_supervised_bytes(
    config: Config,
    plan: MappingPlan,
    inputs: ModelInputs,
    *,
    train: SupervisedDataset,
    held_out: Sequence[SupervisedDataset],
    exactly: bool = True,
) -> dict[str, int]:
    """Returns what `estimate_batch_bytes` does, for a run that learns from the rows of `train` as they are.

    The rows of `held_out` stay for the whole run. While they are evaluated, each model leaves one number for each
    response token, and a model that scores one for each row. The rows of an iteration are as long as the longest.

    Args:
        exactly: whether the tokens of `held_out` are counted, which reads all its rows; otherwise each row is as long
            as the longest.
    """
    recipe, sample = config.recipe, train.batch([0])
    batch_size = config.algorithm.model_dump()["batch_size"]
    sizes = [
        _measure(data.batch(range(len(data)))) if exactly else _bound(data, sample, len(data)) for data in held_out
    ]
    held_bytes = sum(size.num_bytes for size in sizes)
    longest = RowTokens(
        source=train.source,
        where=str,
        prompts=[train.max_prompt_tokens] * batch_size * len(sample),
        responses=[train.max_response_tokens] * batch_size * len(sample),
    )
    text_bytes = {each.data.source: _measure_texts(each.data) for each in inputs.evaluations}
    found = _count_phases(walk_supervised(config, plan, inputs, longest), text_bytes, 0, 1)
    found["iterations"] += _bound(train, sample, batch_size).num_bytes
    if getattr(recipe.roles[0].load_worker(), "head", "lm") == "score":
        found["evaluation"] = max(2 * _FLOAT_BYTES * size.num_rows for size in sizes)
    else:
        num_models = sum(role.has_model for role in recipe.roles) + len(recipe.played)
        found["evaluation"] = max(_FLOAT_BYTES * num_models * size.response_tokens for size in sizes)
    return {phase: held_bytes + num_bytes for phase, num_bytes in found.items()}


def _count_phases(
    phases: Iterator[tuple[Phase, RowTokens, list[TracedResult]]],
    text_bytes: Mapping[str, float],
    block_tokens: int,
    num_candidates: int,
) -> dict[str, int]:
    """Returns the most bytes that each phase stores.

    Args:
        phases: what each phase stores.
        text_bytes: of a row's texts, by the source of the rows.
        block_tokens: tokens of a row that is learned as text; 0 if the run has no such rows.
        num_candidates: likeliest tokens that a teacher names for each token.
    """
    found: dict[str, int] = {}
    set_names = map(_name_set, count())
    for phase, tokens, results in phases:
        num_bytes = 0.0
        for result in results:
            # Responses that no call made are rows to learn.
            longest = block_tokens if block_tokens and result.call is None else max(tokens.responses)
            response_tokens = result.num_rows * longest
            for name in result.columns:
                if name == "answer":
                    num_bytes += text_bytes[tokens.source] * result.num_rows
                elif name in _CANDIDATES:
                    num_bytes += _FLOAT_BYTES * num_candidates * response_tokens
                elif name in _ROW_BYTES:
                    num_bytes += _ROW_BYTES[name] * result.num_rows
                else:
                    size = find_column_size(name)
                    num_bytes += size.row_bytes * result.num_rows + size.response_token_bytes * response_tokens
                    if size.prompt_token_bytes:
                        num_bytes += size.prompt_token_bytes * _sum_longest(tokens.prompts, result.num_rows)
        name = next(set_names) if phase == "sets" else phase
        found[name] = max(found.get(name, 0), math.ceil(num_bytes))
    return found


class _Size(NamedTuple):
    """Size of a batch: its rows, its bytes with those of the rows' lengths, and the tokens of its responses."""

    num_rows: int
    num_bytes: int
    response_tokens: int


def _measure(batch: TensorDict) -> _Size:
    """Returns the size of a batch."""
    columns: dict[str, Any] = dict(batch.items())
    jagged = {name: column.values() for name, column in columns.items() if column.is_nested}
    num_bytes = sum(column.nbytes for name, column in columns.items() if name not in jagged)
    num_bytes += sum(values.nbytes + _LENGTH_BYTES * len(batch) for values in jagged.values())
    return _Size(len(batch), num_bytes, sum(len(jagged[name]) for name in jagged if _is_response(name)))


def _bound(data: SupervisedDataset, sample: TensorDict, num_chosen: int) -> _Size:
    """Returns the size of `num_chosen` rows of `data` that are all as long as the longest; `sample` is one of them."""
    columns: dict[str, Any] = dict(sample.items())
    num_bytes = response_tokens = 0
    for name, column in columns.items():
        if not column.is_nested:
            num_bytes += column.nbytes
            continue
        tokens = len(sample) * (data.max_prompt_tokens if name == "prompt_ids" else data.max_response_tokens)
        num_bytes += tokens * column.values().element_size() + _LENGTH_BYTES * len(sample)
        response_tokens += tokens if _is_response(name) else 0
    return _Size(num_chosen * len(sample), num_chosen * num_bytes, num_chosen * response_tokens)


def _is_response(name: str) -> bool:
    return name.endswith("_ids") and name != "prompt_ids"


def _name_set(number: int) -> str:
    """The key of a set, as other messages name it."""
    return f"evaluation[{number}]"


def _sum_longest(lengths: Sequence[int], num_rows: int) -> int:
    """Sum of as many lengths, the longest first; the longest stands for rows that are drawn more than once."""
    return sum(nlargest(num_rows, lengths)) + max(lengths) * max(0, num_rows - len(lengths))


def _measure_texts(data: PromptDataset) -> float:
    """Mean bytes of a row's texts: its answer, messages and other columns."""
    batch = data.prompts(range(min(len(data), _NUM_SAMPLED)))
    texts = [batch[name].values() for name in ("answer", "row_extra") if name in batch]
    return sum(int(text.numel()) for text in texts) / len(batch)


def _show(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
