"""Some responses of an iteration as rows of `samples/<iteration>.jsonl`: texts, and what training knows of tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict
    from transformers import PreTrainedTokenizerBase

    from hf_algorithms.roles import Roles
    from hf_controller import BatchFuture

__all__ = ["collect_training_samples", "list_training_samples"]

MOST_ROWS = 32
MOST_BYTES = 256 << 10
"""Of one iteration's rows. Tokens are left out before a row is."""
_TOKEN_COLUMNS = ("rollout_logprobs", "old_logprobs", "advantages", "response_mask")
_COLUMNS = (
    "prompt_ids", "response_ids", "answer?", "scores?", "group_id?", "row_id?", "sample_id?", "finish_reason?",
    *(f"{name}?" for name in _TOKEN_COLUMNS),
)  # fmt: skip


def collect_training_samples(
    batch: BatchFuture,
    roles: Roles,
    tokenizer: PreTrainedTokenizerBase,
    *,
    group_size: int,
    stop_ids: Collection[int] = (),
) -> list[dict[str, Any]]:
    """Returns a mapping for each of the first responses of a batch, with the scores of every function by name.

    Args:
        batch: responses; those to one prompt lie one after another.
        roles: that scored them.
        tokenizer: of the policy.
        group_size: responses to a prompt. Of a larger group than `MOST_ROWS` the first rows are taken.
        stop_ids: tokens at which responses end, which no text has.
    """
    whole = MOST_ROWS // group_size * group_size or MOST_ROWS
    chosen = batch.rows(range(min(whole, batch.num_rows))).select(_COLUMNS)
    given = chosen.result()
    scores: dict[str, list[dict[str, float]]] = {}
    if "sample_id" in given:
        for role, group in roles.groups.items():
            if "recall_scores" in group.methods:
                scores[role] = group.recall_scores(chosen).result()
    rows = list_training_samples(given, tokenizer, stop_ids=stop_ids)
    for number, row in enumerate(rows):
        # a name may be a reward's and a cost's
        named = [(role, name, value) for role, found in scores.items() for name, value in found[number].items()]
        names = [name for _, name, _ in named]
        rewards = {name if names.count(name) == 1 else f"{role}/{name}": value for role, name, value in named}
        if rewards:
            row["rewards"] = rewards
    return rows


def list_training_samples(
    batch: TensorDict, tokenizer: PreTrainedTokenizerBase, *, stop_ids: Collection[int] = ()
) -> list[dict[str, Any]]:
    """Returns a mapping for each row, at most `MOST_BYTES` together as JSON.

    `rollout_logprobs` are the sampler's and `old_logprobs` the trainer's before the update; what the algorithm does not
    compute is absent. `sample` is `[epoch, row, number in the group, attempt]`, unique in a run.

    Args:
        batch: rows of texts, with any of the columns that are written.
        tokenizer: of the policy.
        stop_ids: tokens at which responses end, which no text has.
    """
    from hf_algorithms.data import decode_responses
    from hf_algorithms.jagged import list_rows

    ids = {name: list_rows(batch[name]) for name in ("prompt_ids", "response_ids")}
    prompts = decode_responses(tokenizer, ids["prompt_ids"])
    responses = decode_responses(tokenizer, ids["response_ids"], stop_ids=stop_ids)
    columns = _read_columns(batch)
    known = _decode_tokens(tokenizer, {token for row in ids["response_ids"] for token in row})
    found: list[dict[str, Any]] = []
    left = MOST_BYTES
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        tokens = ids["response_ids"][row]
        sample: dict[str, Any] = {"set": "train", "prompt": prompt, "response": response}
        sample |= {name: values[row] for name, values in columns.items() if name not in _TOKEN_COLUMNS}
        sample["tokens"] = len(tokens)
        of_tokens = {name: columns[name][row] for name in _TOKEN_COLUMNS if name in columns}
        whole = sample | {"token_ids": tokens, "token_texts": [known[token] for token in tokens], **of_tokens}
        sizes = [(len(json.dumps(each)) + 1, each) for each in (whole, sample)]
        fitting = next(((size, each) for size, each in sizes if size <= left), None)
        if fitting is None:
            break
        left -= fitting[0]
        found.append(fitting[1])
    return found


def _decode_tokens(tokenizer: PreTrainedTokenizerBase, ids: Collection[int]) -> dict[int, str]:
    """The text of every token alone, special ones included; empty for an id without a token."""
    # tokenizers that are not fast fail at an id without a token, as a padded vocabulary has
    known = ids if tokenizer.is_fast else set(ids) & set(tokenizer.get_vocab().values())
    return dict.fromkeys(ids, "") | {token: str(tokenizer.decode([token])) for token in known}


def _read_columns(batch: TensorDict) -> Mapping[str, list[Any]]:
    """Numbers of every row, and of every token, as JSON has them: null for NaN."""
    from hf_algorithms.advantages.shaping import TRUNCATED
    from hf_algorithms.jagged import decode_text

    found: dict[str, list[Any]] = {}
    if "row_id" in batch:
        found["row"] = batch["row_id"].tolist()
    if "sample_id" in batch:
        found["sample"] = batch["sample_id"].tolist()
    if "group_id" in batch:
        found["group"] = batch["group_id"].tolist()
    if "answer" in batch:
        found["answer"] = decode_text(batch["answer"])
    if "scores" in batch:
        found["score"] = _round(batch["scores"])
    if "finish_reason" in batch:
        found["finish_reason"] = ["length" if each == TRUNCATED else "stop" for each in batch["finish_reason"].tolist()]
    for name in _TOKEN_COLUMNS:
        if name in batch and batch[name].is_nested:
            found[name] = [_round(row) for row in batch[name].unbind()]
        elif name == "advantages" and name in batch:
            found["advantage"] = _round(batch[name])
    if "advantages" in found and "response_mask" in found:
        rows = zip(found["advantages"], found["response_mask"], strict=True)
        found["advantage"] = [_average(values, mask) for values, mask in rows]
    return found


def _average(values: list[float | None], mask: list[int]) -> float | None:
    """The mean over trained tokens."""
    trained = [value for value, counts in zip(values, mask, strict=True) if counts and value is not None]
    return round(math.fsum(trained) / len(trained), 5) if trained else None


def _round(values: torch.Tensor) -> list[Any]:
    """Booleans as 0 and 1; five decimals say all that a float32 log-prob does to a reader."""
    if not values.is_floating_point():
        return [int(value) for value in values.tolist()]
    return [round(value, 5) if math.isfinite(value) else None for value in values.tolist()]
