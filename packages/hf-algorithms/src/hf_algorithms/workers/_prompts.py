"""Prompts as users have them, and responses as texts: what `sample` adds to a generation engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_algorithms.data import TurnFormat, decode_responses, load_tokenizer
from hf_algorithms.jagged import encode_text, list_rows, to_jagged
from hf_controller import WorkerContext
from hf_engine import SamplingParams
from hf_protocols import ONE_TO_ALL, THREE_D_ALL_MICRO_DP, ConfigError, TransferProtocol
from hf_protocols.errors import DataError
from hf_protocols.similar_names import find_similar
from hf_protocols.validation import show

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

__all__ = ["ALL_TO_REPLICAS", "Prompt", "PromptReader", "split_prompts"]

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

ALL_TO_REPLICAS = TransferProtocol("ALL_TO_REPLICAS", ONE_TO_ALL.distribute, THREE_D_ALL_MICRO_DP.collect)
"""Everything to every rank, which takes its replica's share; one rank of each replica answers, in order."""

_KEYS = ("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "seed", "n", "stop")


class PromptReader:
    """Turns prompts into token ids, and responses into texts.

    Args:
        model: directory or hub name of the model, with its tokenizer.

    Raises:
        ModelError: if the tokenizer cannot be loaded.
    """

    def __init__(self, model: str) -> None:
        from hf_engine.model_directory import read_end_of_sequence_ids, read_model_directory

        self._turns = TurnFormat(load_tokenizer(model), label=repr(model))
        files = read_model_directory(model, needs_weights=False)
        self._stop_ids = self._turns.list_stop_ids(read_end_of_sequence_ids(files))

    def build_sampling(self, given: SamplingParams | Mapping[str, Any], *, seed: int, step: int) -> SamplingParams:
        """Returns how responses are drawn, the model's own ends included.

        Args:
            given: values by name, see `ActorWorker.sample`.
            seed: of the worker, where none is given.
            step: number of the call, so that calls without a seed differ.

        Raises:
            ConfigError: for an unknown key, a missing limit, or a value out of range.
        """
        if isinstance(given, SamplingParams):
            return given
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"sampling = {show(given)}: is not a mapping of values by name. Pass {{'max_new_tokens': 64}}"
            )
        values = dict(given)
        if unknown := [name for name in values if name not in _KEYS]:
            near = find_similar(str(unknown[0]), _KEYS)
            advice = f"Did you mean {show(near[0])}?" if near else f"The keys are {', '.join(_KEYS)}"
            raise ConfigError(f"sampling: {show(unknown[0])} is not a key of it. {advice}")
        if "max_new_tokens" not in values:
            raise ConfigError("sampling: max_new_tokens is missing. Set the largest number of tokens of a response")
        stop = values.pop("stop", ())
        values["stop_strings"] = (stop,) if isinstance(stop, str) else tuple(stop)
        if values.get("temperature") == 0:
            values |= {"temperature": 1.0, "greedy": True}
        drawn_from: dict[str, Any] = {} if "seed" in values else {"seed": seed, "step": step}
        return SamplingParams(**values, **drawn_from, stop_token_ids=self._stop_ids)

    def encode(self, prompts: object) -> list[list[int]]:
        """Returns the ids of every prompt.

        Raises:
            DataError: for something else than a list of prompts, an empty one, or a chat that the template refuses.
        """
        if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence) or not prompts:
            raise DataError(
                f"prompts = {show(prompts)}: is not a list of prompts. Pass a list of texts, of chats, or of lists of "
                "token ids"
            )
        found = [self._encode(prompt, number) for number, prompt in enumerate(prompts)]
        if empty := [number for number, ids in enumerate(found) if not ids]:
            raise DataError(f"prompts[{empty[0]}]: has no tokens, so nothing can follow it. Add one, or leave it out")
        return found

    def join(self, batch: TensorDict, responses: TensorDict, *, num_samples: int, num_kept: int) -> TensorDict:
        """Returns the samples of the first prompts with their prompts and texts.

        Args:
            batch: prompts that were generated from.
            responses: `num_samples` rows to each, one after another.
            num_samples: responses to each prompt.
            num_kept: prompts whose samples are wanted.
        """
        from tensordict import TensorDict

        prompts = [ids for ids in batch["prompt_ids"].unbind() for _ in range(num_samples)]
        ids = list_rows(responses["response_ids"])
        texts = decode_responses(self._turns.tokenizer, ids, stop_ids=frozenset(self._stop_ids))
        columns: dict[str, torch.Tensor] = {
            "row_id": batch["row_id"].repeat_interleave(num_samples),
            "prompt_ids": to_jagged(prompts),
            "text": encode_text(texts),
            **{
                name: responses[name] for name in ("response_ids", "response_mask", "rollout_logprobs", "finish_reason")
            },
        }
        if num_kept < len(batch):
            columns = {name: _first(column, num_kept * num_samples) for name, column in columns.items()}
        return TensorDict(columns, batch_size=[num_kept * num_samples])

    def _encode(self, prompt: object, number: int) -> list[int]:
        name = f"prompts[{number}]"
        if isinstance(prompt, str):
            return self._turns.encode_prompts([prompt], name_row=lambda _: name)[0]
        if isinstance(prompt, Sequence) and all(isinstance(each, Mapping) for each in prompt):
            messages: list[Any] = [dict(each) for each in prompt if isinstance(each, Mapping)]
            return self._turns.encode_prompts([messages], name_row=lambda _: name)[0]
        if isinstance(prompt, Sequence) and all(type(each) is int for each in prompt):
            return [each for each in prompt if isinstance(each, int)]
        raise DataError(
            f"{name} = {show(prompt)}: is not a prompt. Pass a text, a list of messages with role and content, or a "
            "list of token ids"
        )


def split_prompts(prompts: Sequence[Sequence[int]], context: WorkerContext) -> tuple[TensorDict, int]:
    """Returns this rank's share of the prompts as a batch, and how many of its rows count.

    Every replica needs a row: where prompts are fewer, some are generated from twice, and their second rows left out.
    """
    import torch
    from tensordict import TensorDict

    topology = context.topology
    num_replicas = len(THREE_D_ALL_MICRO_DP.collect(topology).ranks)
    shares = THREE_D_ALL_MICRO_DP.distribute(topology, max(len(prompts), num_replicas))
    own = list(shares[context.rank])
    rows = [row % len(prompts) for row in own]
    columns = {
        "row_id": torch.tensor(rows, dtype=torch.int64),
        "prompt_ids": to_jagged([torch.tensor(prompts[row], dtype=torch.int64) for row in rows]),
    }
    return TensorDict(columns, batch_size=[len(rows)]), sum(row < len(prompts) for row in own)


def _first(column: Any, num_rows: int) -> torch.Tensor:
    """The first rows of a column; a jagged one cannot be sliced."""
    if not column.is_nested:
        cut: torch.Tensor = column[:num_rows]
        return cut
    import torch

    offsets = column.offsets()[: num_rows + 1]
    first: torch.Tensor = torch.nested.nested_tensor_from_jagged(column.values()[: int(offsets[-1])], offsets)
    return first
