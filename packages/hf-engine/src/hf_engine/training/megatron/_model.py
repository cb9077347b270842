"""A causal language model as megatron-core builds one pipeline stage of it, and the outputs of its last stage."""

from __future__ import annotations

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
from hf_engine.training.outputs import OutputRequest, place_at
from hf_engine.training.token_logprobs import TokenScores

__all__ = ["Decoder", "build_decoder"]


class Decoder(GPTModel):  # type: ignore[misc]
    """One stage; the last one returns its hidden states [S, b, h] and holds the output layer or a value head."""

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Hidden states from token ids, or from those that the schedule received; see `DecoderInputs`."""
        embedded = None
        if self.pre_process:
            embedded = self.embedding(input_ids=input_ids, position_ids=None)
            if self.padding_id is not None:
                # transformers' embedding learns nothing from its padding token, wherever it stands
                is_padding = (input_ids == self.padding_id).T[:, :, None]
                own = is_padding.chunk(input_ids.shape[1] // len(embedded))[self._sequence_part]
                embedded = torch.where(own, embedded.detach(), embedded).contiguous()
        hidden: torch.Tensor = super().forward(
            input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, decoder_input=embedded
        )
        return hidden

    def _preprocess(self, *, position_ids: torch.Tensor | None, **inputs: Any) -> tuple[Any, ...]:
        embedded, angles, *others = super()._preprocess(position_ids=None, **inputs)
        if position_ids is not None:  # [S, 1, 1, d], by position, becomes [S, b, 1, d]
            angles = angles[:, 0][position_ids.T]
        return embedded, angles, *others

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
        """`values`, or `logprobs` and what else is asked for: [b, T] with zeros at padding.

        Args:
            hidden: [n, h] of the last stage, from which the n response tokens are predicted, row by row.
            micro_batch: of these tokens.
            request: see `TrainBackend.compute_logprobs`.
        """
        mask = micro_batch.response_mask
        positions = mask.flatten().nonzero().squeeze(1)
        if self.value_head is not None:
            found = {"values": self.value_head(hidden).squeeze(-1).float()}
        else:
            found = self._score(hidden, micro_batch, positions, request)
        positions = positions.to(hidden.device)
        return {name: place_at(positions, output, mask.shape) for name, output in found.items()}

    def _score(
        self, hidden: torch.Tensor, micro_batch: MicroBatch, positions: torch.Tensor, request: OutputRequest
    ) -> dict[str, torch.Tensor]:
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        group, vocab_size = self.pg_collection.tp, self.real_vocab_size
        ids = micro_batch.response_ids.flatten()[positions].to(hidden.device)

        def compute(candidate_ids: torch.Tensor | None) -> TokenScores:
            return compute_vocab_parallel_logprobs(
                hidden,
                weight,
                ids,
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
            None if candidates is None else candidates.flatten(0, 1)[positions].to(hidden.device),
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
    decoder.rotary_pos_emb.inv_freq = torch.tensor(model.inverse_frequencies, dtype=torch.float32, device=device)
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
