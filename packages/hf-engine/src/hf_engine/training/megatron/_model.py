"""A causal language model as megatron-core builds one pipeline stage of it, up to the hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hf_engine.backends.base import Head
from hf_engine.resharding.tensor_parallel import padded_vocab_size, split_layers
from hf_engine.training.megatron._config import MegatronModelConfig
from hf_engine.training.megatron._core import GPTModel, gather_from_sequence_parallel_region
from hf_engine.training.megatron._layers import build_block_spec
from hf_engine.training.megatron._logprobs import compute_vocab_parallel_logprobs, find_vocab_parallel_top_ids
from hf_engine.training.megatron._parallel import ParallelGroups
from hf_engine.training.micro_batches import MicroBatch
from hf_engine.training.outputs import OutputRequest
from hf_engine.training.token_logprobs import TokenScores

__all__ = ["Decoder", "DecoderInputs", "build_decoder"]


class Decoder(GPTModel):  # type: ignore[misc]
    """One stage; the last one returns its hidden states [S, b, h] and holds the output layer or a value head."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Hidden states from token ids [b, S], or from those that the schedule received from the stage before."""
        embedded = None
        if self.pre_process:
            embedded = self.embedding(input_ids=input_ids, position_ids=None)
            if self.padding_id is not None:
                # transformers' embedding learns nothing from its padding token, wherever it stands
                is_padding = (input_ids == self.padding_id).T[:, :, None]
                own = is_padding.chunk(input_ids.shape[1] // len(embedded))[self._sequence_part]
                embedded = torch.where(own, embedded.detach(), embedded).contiguous()
        hidden: torch.Tensor = super().forward(
            input_ids=input_ids, position_ids=None, attention_mask=attention_mask, decoder_input=embedded
        )
        return hidden

    @property
    def _sequence_part(self) -> int:
        return self.pg_collection.tp.rank() if self.config.sequence_parallel else 0

    def _postprocess(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        if not (self.post_process and self.config.sequence_parallel):
            return hidden_states
        # Every rank's gradient of the whole sequence is complete, so backward each takes its part and adds nothing.
        whole: torch.Tensor = gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
        )
        return whole

    def outputs(self, hidden: torch.Tensor, micro_batch: MicroBatch, request: OutputRequest) -> dict[str, torch.Tensor]:
        """`values`, or `logprobs` and what else is asked for: [b, T] from hidden states [b, T, h] of the last stage."""
        if self.value_head is not None:
            return {"values": self.value_head(hidden).squeeze(-1).float()}
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        group, vocab_size = self.pg_collection.tp, self.real_vocab_size

        def compute(candidate_ids: torch.Tensor | None) -> TokenScores:
            return compute_vocab_parallel_logprobs(
                hidden,
                weight,
                micro_batch.response_ids.to(hidden.device),
                group=group,
                vocab_size=vocab_size,
                temperature=request.temperature,
                entropy=request.entropy,
                candidate_ids=candidate_ids,
            )

        candidates = micro_batch.candidate_ids
        return request.ask(
            compute,
            partial(find_vocab_parallel_top_ids, hidden, weight, request.top_k, group=group, vocab_size=vocab_size),
            None if candidates is None else candidates.to(hidden.device),
        )


def build_decoder(
    model: MegatronModelConfig, config: Any, groups: ParallelGroups, head: Head, device: torch.device
) -> Decoder:
    """This rank's stage with uninitialised weights; a value head is zero.

    Args:
        model: what to build.
        config: megatron-core's TransformerConfig for it.
        groups: the process groups.
        head: see `TrainBackend.build`.
        device: where the weights live.
    """
    shape = model.shape
    layers = split_layers(shape.num_layers, groups.topology.train.pp_size)[groups.at.pp]
    decoder = Decoder(
        config=config,
        transformer_layer_spec=build_block_spec(shape, len(layers)),
        vocab_size=padded_vocab_size(shape.vocab_size, groups.topology.train.tp_size),
        max_sequence_length=shape.max_positions,
        pre_process=groups.is_first_stage,
        post_process=groups.is_last_stage,
        share_embeddings_and_output_weights=shape.tie_embeddings and head == "lm",
        position_embedding_type="rope",
    )
    decoder.to(device)
    decoder.rotary_pos_emb.inv_freq = torch.tensor(model.inverse_frequencies, device=device)
    decoder.real_vocab_size = shape.vocab_size
    decoder.padding_id = model.padding_id
    decoder.value_head = None
    if head == "value" and groups.is_last_stage:
        del decoder.output_layer
        decoder.value_head = torch.nn.Linear(shape.hidden_size, 1, bias=False, device=device, dtype=config.params_dtype)
        torch.nn.init.zeros_(decoder.value_head.weight)
    # Dropout is off either way; megatron-core recomputes activations in training mode only.
    decoder.train(config.recompute_granularity is not None)
    return decoder


@dataclass(frozen=True)
class DecoderInputs:
    """A micro-batch as megatron-core wants it: rows start at column 0, so that a causal mask is all there is."""

    micro_batch: MicroBatch
    window: int | None
    """Keys that a query sees, itself included; None: all."""
    multiple: int
    """The width S is a multiple of it: the number of ranks that share a sequence."""

    @property
    def input_ids(self) -> torch.Tensor:
        """int64 [b, S], padding moved to the right."""
        ids = self.micro_batch.input_ids
        columns = torch.arange(ids.shape[1]) + self._left_padding[:, None]
        moved = ids.gather(1, columns % ids.shape[1])
        return torch.nn.functional.pad(moved, (0, self._width - ids.shape[1]))

    @property
    def attention_mask(self) -> torch.Tensor:
        """[1, 1, S, S], bool: True where a query must not look."""
        columns = torch.arange(self._width)
        distance = columns[:, None] - columns
        hidden = distance < 0
        if self.window is not None:
            hidden |= distance >= self.window
        return hidden[None, None]

    def predicting(self, hidden: torch.Tensor) -> torch.Tensor:
        """[b, T, h], the states [S, b, h] at the columns that predict the response tokens."""
        last_of_prompt = self.micro_batch.prompt_width - self._left_padding - 1
        steps = torch.arange(self.micro_batch.response_mask.shape[1])
        columns = (last_of_prompt[:, None] + steps).to(hidden.device)
        return hidden.transpose(0, 1).gather(1, columns[:, :, None].expand(-1, -1, hidden.shape[-1]))

    @property
    def _width(self) -> int:
        return -(-self.micro_batch.input_ids.shape[1] // self.multiple) * self.multiple

    @property
    def _left_padding(self) -> torch.Tensor:
        """int64 [b], columns before each row's prompt."""
        mask = self.micro_batch.attention_mask[:, : self.micro_batch.prompt_width]
        return mask.shape[1] - mask.sum(-1)
