"""Models that compute one number from a prompt and its response: reward models and cost models."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from hf_algorithms.data import SequenceEncoder, cut_to, decode_responses, load_tokenizer
from hf_algorithms.jagged import decode_text, to_jagged
from hf_algorithms.replay import record_call
from hf_algorithms.workers._model import SEQUENCE, Metrics, ModelWorker, on_device
from hf_algorithms.workers._trained import TrainedWorker
from hf_controller import WorkerContext
from hf_engine import SupportsScores
from hf_protocols import THREE_D, register

if TYPE_CHECKING:
    from tensordict import TensorDict
    from transformers import PreTrainedTokenizerBase

    from hf_algorithms.losses import Loss
    from hf_algorithms.workers._setup import RoleSetup

__all__ = ["PairScorer", "RewardModelWorker"]


class PairScorer(TrainedWorker):
    """One rank of a reward model that learns from pairs."""

    head = "score"
    learning_rate_key = "critic_learning_rate"

    @register(
        protocol=THREE_D, reads=("row_id", "prompt_ids", "response_ids", "rejected_ids"), writes=("scores",),
        kind="inference",
    )  # fmt: skip
    @on_device
    def score_pairs(self, batch: TensorDict) -> TensorDict:
        """`scores` float32 [B, 2], of the chosen and of the rejected response."""
        return _compute_scores(self._train, batch)

    @register(
        protocol=THREE_D, returns="metrics", kind="training",
        reads=("row_id", "prompt_ids", "response_ids", "rejected_ids", "signs?"),
    )  # fmt: skip
    @on_device
    @record_call
    def update_scores(self, batch: TensorDict, loss: Loss) -> Metrics:
        """One optimizer step on the loss of all ranks' pairs."""
        (count,) = self._train.sum_over_data([loss.count({str(name): batch[name] for name, _ in batch.items()})])
        return self._name(self._train.train_step(batch, loss, count))


class RewardModelWorker(ModelWorker):
    """One rank of a reward model or cost model that scores the actor's responses; it is never trained.

    A model with another tokenizer than the actor's reads the texts: its own tokenizer encodes them. Where the prompt is
    a chat, its messages are rendered by the model's own chat template, also if the vocabulary is the actor's. What is
    longer than the model's context loses its start.

    Args:
        encodes: directories of the actor's and of the model's tokenizer; None if they and their templates are alike.
        shares_ids: the two tokenizers have one vocabulary: what is not a chat is read as token ids.
        max_tokens: of a prompt and its response together.
        stop_ids: tokens of the actor at which responses end.
    """

    head = "score"
    trainable = False

    @classmethod
    def configure(cls, setup: RoleSetup) -> dict[str, Any]:
        """Returns the constructor's arguments for a role of a run."""
        own = setup.model.own_tokenizer_path
        return {
            **super().configure(setup),
            "encodes": None if own is None else (setup.model.tokenizer_path, own),
            "shares_ids": setup.model.shares_ids,
            "max_tokens": min(setup.model.shape.max_positions, setup.placed.micro_batch_tokens),
            "stop_ids": setup.stop_ids,
        }

    def __init__(
        self,
        context: WorkerContext,
        *,
        encodes: tuple[str, str] | None,
        shares_ids: bool = False,
        max_tokens: int,
        stop_ids: Collection[int] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(context, **kwargs)
        self._max_tokens = max_tokens
        self._shares_ids = shares_ids
        self._stop_ids = frozenset(stop_ids)
        self._actors: PreTrainedTokenizerBase | None = None
        if encodes is not None:
            self._actors = load_tokenizer(encodes[0])
            self._encoder = SequenceEncoder(load_tokenizer(encodes[1], needs_end=False), label=encodes[1])

    @register(protocol=THREE_D, reads=(*SEQUENCE, "row_extra?"), writes=("model_scores",), kind="inference")
    @on_device
    def compute_model_scores(self, batch: TensorDict) -> TensorDict:
        """`model_scores` float32 [B]: the number of each prompt and its response."""
        import torch
        from tensordict import TensorDict

        encode = self._pass_through if self._actors is None else self._encode
        rows = [cut_to(self._max_tokens, prompt, [response]) for prompt, response in encode(batch)]
        columns = {
            name: to_jagged([torch.tensor(row[place], dtype=torch.int64) for row in rows])
            for place, name in enumerate(("prompt_ids", "response_ids"))
        }
        return _compute_scores(self._train, TensorDict(columns, batch_size=batch.batch_size)).rename_key_(
            "scores", "model_scores"
        )

    def _pass_through(self, batch: TensorDict) -> list[tuple[list[int], list[int]]]:
        prompts, responses = (batch[name].unbind() for name in ("prompt_ids", "response_ids"))
        return [(prompt.tolist(), response.tolist()) for prompt, response in zip(prompts, responses, strict=True)]

    def _encode(self, batch: TensorDict) -> list[tuple[list[int], list[int]]]:
        """The rows for the model's own tokenizer."""
        assert self._actors is not None
        ids = self._pass_through(batch)
        prompts = decode_responses(self._actors, [prompt for prompt, _ in ids])
        responses = decode_responses(self._actors, [response for _, response in ids], stop_ids=self._stop_ids)
        chats = [json.loads(text)[0] for text in decode_text(batch["row_extra"])] if "row_extra" in batch else []
        found = []
        for place, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            has_ended = bool(ids[place][1]) and ids[place][1][-1] in self._stop_ids
            if chats and chats[place] is not None:
                answer = [{"role": "assistant", "content": response}]
                encoded = self._encoder.encode_chat(chats[place], [answer], has_ended=has_ended)
                found.append((encoded[0], encoded[1]))
            elif self._shares_ids:
                found.append(ids[place])
            else:
                found.append(self._encoder.encode_text(prompt, response, has_ended=has_ended))
        return found


def _compute_scores(backend: object, batch: TensorDict) -> TensorDict:
    assert isinstance(backend, SupportsScores), "a backend that was built with head='score'"
    return backend.compute_scores(batch)
