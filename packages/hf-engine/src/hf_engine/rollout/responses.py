"""Inputs and outputs of rollout backends, the same for all of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import astuple
from typing import Any
from zlib import crc32

import torch
from tensordict import TensorDict

from hf_engine.backends.base import SamplingParams
from hf_engine.backends.jagged import Ragged, read_ids, require_columns, to_jagged
from hf_engine.model_directory import check_end_of_sequence_ids
from hf_engine.rollout.memory import host_bytes
from hf_protocols.errors import BackendError, BatchError, NonFiniteLossError
from hf_protocols.validation import Checks

__all__ = ["LENGTH", "STOP", "build_responses", "digest_request", "end_of_sequence_ids", "read_prompts"]

_check = Checks(BackendError)

STOP, LENGTH = 0, 1
"""Finish reasons: a stop token was drawn, or the response is as long as it may be."""

_SAMPLE_BYTES, _TOKEN_BYTES = 4 << 10, 64
"""Of the host's memory, about: an engine's request, and the random number, id and log-prob of each of its tokens."""
_ALWAYS_THERE_BYTES = 64 << 20
"""Any machine that has loaded an engine has as much: for less its memory is not looked up, which takes time."""


def read_prompts(
    batch: TensorDict, sampling: SamplingParams, *, vocab_size: int, positions: int | None, ends: Collection[int]
) -> Ragged:
    """Returns the prompts of a batch, after refusing those that no engine can generate from.

    Engines are asked for nothing before: some fail at a token that they do not know and cannot be used again.

    Args:
        batch: columns `prompt_ids` (jagged) and `row_id` (int64 [B]).
        sampling: how responses will be drawn.
        vocab_size: ids of prompts and of stop tokens are below it.
        positions: the model's, for a prompt and `max_new_tokens`; None: any number.
        ends: the model's own tokens that end a response, which `min_new_tokens` forbids too.

    Raises:
        BatchError: for columns that are missing or of another kind, or an id outside the vocabulary.
        BackendError: for prompts that are empty or do not fit, a stop token outside the vocabulary, a minimum length
            that leaves no token to draw, or more samples than the machine's memory holds.
    """
    _check.kind("sampling", sampling, SamplingParams, "SamplingParams(max_new_tokens=...)")
    require_columns(batch, ("prompt_ids", "row_id"))
    prompts = read_ids(batch, "prompt_ids", vocab_size)
    _check_row_ids(batch["row_id"], batch.batch_size)
    if strangers := [token for token in sampling.stop_token_ids if token >= vocab_size]:
        raise BackendError(
            f"stop_token_ids={sampling.stop_token_ids} holds {strangers[0]}, the model's ids are 0 to "
            f"{vocab_size - 1}. Use the model's own tokenizer"
        )
    stops = set(sampling.stop_token_ids)
    if sampling.min_new_tokens and len(stops | set(ends)) == vocab_size:
        own = "" if len(stops) == vocab_size else " or the model's own eos_token_id"
        raise BackendError(
            f"min_new_tokens={sampling.min_new_tokens} and all {vocab_size} tokens in stop_token_ids{own}: none is "
            "left to draw. Name fewer stop tokens, or set min_new_tokens to 0"
        )
    limit = None if positions is None else positions - sampling.max_new_tokens
    for row, length in enumerate(prompts.lengths.tolist()):
        if length == 0:
            raise BackendError(f"prompt of row {row} is empty; a prompt needs at least one token")
        if limit is not None and length > limit:
            raise BackendError(
                f"prompt of row {row} has {length} tokens, above the model's {positions} positions - "
                f"max_new_tokens={sampling.max_new_tokens} = {limit}. Shorten the prompt or lower max_new_tokens"
            )
    _check_memory(len(prompts.lengths), sampling)
    return prompts


def digest_request(prompts: Ragged, row_id: torch.Tensor, sampling: SamplingParams) -> int:
    """A number that differs where prompts, their row ids or the sampling do."""
    digest = crc32(repr([_as_one(value) for value in astuple(sampling)]).encode())
    for numbers in (prompts.packed, prompts.lengths, row_id):
        digest = crc32(numbers.cpu().long().contiguous().numpy().tobytes(), digest)
    return digest


def _as_one(value: object) -> object:
    """The same for 1 and 1.0, and for the same stops in another order."""
    if isinstance(value, tuple | list):
        return sorted(set(value))
    return int(value) if isinstance(value, float) and value.is_integer() else value


def build_responses(
    ids: torch.Tensor, logprobs: torch.Tensor, lengths: torch.Tensor, reasons: torch.Tensor, *, n: int, version: int
) -> TensorDict:
    """The columns that `RolloutBackend.generate` returns.

    Args:
        ids: int64, the tokens of all samples one after the other.
        logprobs: float32, aligned with `ids`.
        lengths: int64 [B * n].
        reasons: int64 [B * n], finish reasons.
        n: samples per prompt.
        version: of the weights.

    Raises:
        NonFiniteLossError: for a log-prob that is not finite, naming the row of its prompt.
    """
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    if not torch.isfinite(logprobs).all():
        token = (~torch.isfinite(logprobs)).nonzero()[0]
        row = int(torch.searchsorted(offsets, token, right=True) - 1) // n
        cause = "the weights have diverged. Lower the learning rate"
        if version == 0:
            cause = "before any update: the model's files hold weights that are not finite, or too large for the dtype"
        raise NonFiniteLossError(
            f"the model's logits for the prompt of row {row} are not finite at weight version {version}"
            f"{', ' if version == 0 else ': '}{cause}"
        )
    return TensorDict(
        {
            "response_ids": to_jagged(ids, offsets),
            "response_mask": to_jagged(torch.ones_like(ids, dtype=torch.bool), offsets),
            "rollout_logprobs": to_jagged(logprobs, offsets),
            "finish_reason": reasons,
            "weight_version": torch.full_like(reasons, version),
        },
        batch_size=[len(lengths)],
    )


def end_of_sequence_ids(generation_config: Any, text_config: Any) -> frozenset[int]:
    """As `read_end_of_sequence_ids`, of configurations that transformers has read."""
    stated = getattr(generation_config, "eos_token_id", None)
    ids = stated if stated is not None else text_config.eos_token_id
    return frozenset() if ids is None else check_end_of_sequence_ids(ids, text_config.vocab_size)


def _check_memory(num_prompts: int, sampling: SamplingParams) -> None:
    """One bound for all engines: where it is passed some run out of memory on the way, and cannot be used again."""
    # Without a prompt, too: torch makes ranges of these lengths, and other ranks may have prompts.
    needed = max(1, num_prompts) * sampling.n * (_SAMPLE_BYTES + sampling.max_new_tokens * _TOKEN_BYTES)
    if needed > _ALWAYS_THERE_BYTES and needed > (memory := host_bytes()):
        given = f"{num_prompts} prompts" if num_prompts else "even one prompt"
        raise BackendError(
            f"{given} x n={sampling.n} samples of max_new_tokens={sampling.max_new_tokens} take about {needed} bytes, "
            f"this machine has {memory}. Lower n or max_new_tokens, or give fewer prompts at a time"
        )


def _check_row_ids(column: Any, shape: torch.Size) -> None:
    is_tensor = isinstance(column, torch.Tensor)
    if is_tensor and not column.is_nested and column.shape == shape and column.dtype in (torch.int64, torch.int32):
        return
    what = f"{column.dtype} of shape {tuple(column.shape)}" if is_tensor else repr(column)
    raise BatchError(f"the column 'row_id' is {what}. Use one whole number a row, torch.int64 of shape [B]")
