"""Generation embedded in the training process: a transformers model and a decode loop made for batches.

Weights are replicated: every rank is one generation replica. Prompts are padded on the left, the n samples of a
prompt share its prefill, keys and values live in buffers of the final length, and finished rows leave the batch.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from tensordict import TensorDict
from transformers import DynamicCache
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from hf_engine.agreement import check_version
from hf_engine.backends.base import SamplingParams
from hf_engine.backends.build_arguments import check_rollout_arguments
from hf_engine.backends.closed import Closed
from hf_engine.backends.gradients import with_gradients
from hf_engine.backends.jagged import Ragged
from hf_engine.backends.lora_config import LoraConfig
from hf_engine.model_directory import ModelDirectory, errors_of
from hf_engine.models.causal_lm import (
    build_without_memory,
    keeps_state,
    load_causal_lm,
    move_to,
    read_text_config,
    refuse_lacking,
)
from hf_engine.models.conversions import find_buffer_owners, persistent_buffers, read_file_names
from hf_engine.models.lora import add_adapters, named_parameters
from hf_engine.models.rope import find_rope_limits
from hf_engine.models.stacked_experts import layout_in_files, stack_of, tensors_in_files
from hf_engine.process_groups import local_device
from hf_engine.resharding.layouts import WeightLayout, replicated_layout
from hf_engine.resharding.moving import hold_training_weights, storage_bytes
from hf_engine.rollout.dtype import RolloutDtype, check_dtype
from hf_engine.rollout.memory import check_sizes, choose_cache_bytes, lack_of_memory_is_an_error
from hf_engine.rollout.responses import LENGTH, build_responses, end_of_sequence_ids, read_prompts
from hf_engine.rollout.sampling import draw_uniforms
from hf_engine.rollout.stop_strings import load_stop_strings
from hf_engine.rollout.transformers._cache import build_cache
from hf_engine.rollout.transformers._decoding import Decoding
from hf_protocols.errors import BackendError, ReshardError
from hf_protocols.models import ModelShape
from hf_protocols.positions import compute_positions
from hf_protocols.topology import GenerationSpec, Topology
from hf_protocols.validation import show

__all__ = ["TransformersBackend"]

_ATTENTION = {DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer}
_DEFAULT_CACHE_BYTES = 4 << 30
_SCORE_BYTES = 12
"""Of two tokens and a head, while a layer without a fused function computes attention: three float32 numbers.

With all activations of the pass, tiny models of two families had a peak of 7 to 14 bytes.
"""


class TransformersBackend:
    """The embedded rollout backend; see `RolloutBackend` for what every method means.

    Supports `gen_tp_size = gen_pp_size = 1`. Log-probs are of the full distribution at the sampling temperature.
    """

    largest_generation: ClassVar[GenerationSpec | None] = GenerationSpec()

    def __init__(self, model: Any, *, topology: Topology, cache_bytes: int, lora: LoraConfig | None = None) -> None:
        self._model = model
        self._lora = lora
        self._topology = topology
        self._cache_bytes = cache_bytes
        self._stop_token_ids = end_of_sequence_ids(model.generation_config, model.config.get_text_config())
        self._parameters: dict[str, torch.nn.Parameter] = named_parameters(model)
        self._buffer_owners = find_buffer_owners(model)
        self._own = {name: parameter.data for name, parameter in self._parameters.items()}
        self._file_names = read_file_names(model)
        self._views = {name: tensors_in_files(self._file_names, {name: each}) for name, each in self._own.items()}
        # Cut now: of a storage that was freed torch makes no views.
        self._buffers = {name: view for views in self._views.values() for name, view in views.items()}
        self._parameter_of = {name: whole for whole, views in self._views.items() for name in views}
        self._positions = compute_positions(model.config.get_text_config().to_dict())
        self._rope_limits = find_rope_limits(model.config.get_text_config())
        self._weight_version = 0
        self._has_weights = True

    @classmethod
    @with_gradients()
    def build(
        cls,
        model: str | Path,
        *,
        topology: Topology,
        seed: int = 0,
        dtype: RolloutDtype = "float32",
        cache_bytes: int | None = None,
        cache_fraction: float | None = None,
        lora: LoraConfig | None = None,
    ) -> TransformersBackend:
        """Loads a causal language model of transformers in evaluation mode.

        Args:
            model: directory or hub name.
            topology: ranks and generation sizes.
            seed: of adapters before the first transition; samples derive from `SamplingParams.seed`.
            dtype: of weights and computation, for any training dtype: shards are cast on their way.
            cache_bytes: bound on keys and values, 4 GiB by default; more rows than fit are generated in turns. Scores
                of a prefill count, too, where attention writes them (Gemma 2, gpt-oss).
            cache_fraction: instead, as a share of the device's memory (the host's, without a device), below 1.
            lora: the model gets adapters like those of the training backend, which a transition fills.

        Raises:
            BackendError: for a generation layout other than 1-1, a model that transformers cannot load or whose files
                lack parameters, or one whose layers remember something else than keys and values.
        """
        check_rollout_arguments(topology, seed)
        check_dtype(dtype)
        if cache_fraction is None and cache_bytes is None:
            cache_bytes = _DEFAULT_CACHE_BYTES
        cache_bytes = choose_cache_bytes(cache_bytes, cache_fraction)
        generation = topology.generation
        if generation is not None and generation != cls.largest_generation:
            raise BackendError(
                f"backend 'transformers' holds the whole model on every rank: gen_pp_size={generation.gen_pp_size}, "
                f"gen_tp_size={generation.gen_tp_size} are not supported. Set both to 1 or choose another backend"
            )
        loaded, missing, files = load_causal_lm(model, getattr(torch, dtype))
        refuse_lacking(files, missing)
        _check_layers(loaded)
        if lora is not None:
            add_adapters(loaded, lora, seed=seed)
        loaded.eval().requires_grad_(False)
        move_to(local_device(), loaded)
        return cls(loaded, topology=topology, cache_bytes=cache_bytes, lora=lora)

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuses a cache that no machine has; see `SupportsOptionCheck`."""
        check_sizes(options)

    @classmethod
    def check_model(cls, model: ModelDirectory, *, on_cpu: bool, options: Mapping[str, Any] | None = None) -> None:
        """Refuses a configuration that transformers cannot build, or other layers than attention's."""
        del on_cpu, options
        _check_layers(build_without_memory(model))

    @classmethod
    def check_prompts(cls, model: ModelDirectory, lengths: Sequence[int], *, max_new_tokens: int) -> None:
        """Refuses prompts whose cached keys would not be those of the whole row; see `SupportsPromptCheck`."""
        find_rope_limits(read_text_config(model)).check_prompts(lengths, max_new_tokens)

    @classmethod
    def check_row(cls, options: Mapping[str, Any], shape: ModelShape, *, tokens: int, samples: int) -> None:
        """Refuses a row whose keys and values are above `cache_bytes`; see `SupportsRowCheck`."""
        given = options.get("cache_bytes")
        if given is None and options.get("cache_fraction") is not None:
            return  # a share of a machine's memory
        cache_bytes = _DEFAULT_CACHE_BYTES if given is None else given
        item_bytes = getattr(torch, options.get("dtype", "float32")).itemsize
        token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * item_bytes
        if (row_bytes := tokens * samples * token_bytes) > cache_bytes:
            raise BackendError(
                f"cache_bytes = {cache_bytes}: a row of {tokens} tokens x {samples} samples needs {row_bytes} bytes of "
                f"keys and values. Raise it to at least {row_bytes}, or lower n or max_new_tokens"
            )

    @classmethod
    def find_adapter_refusal(
        cls, model: ModelDirectory, lora: LoraConfig, options: Mapping[str, Any], *, on_cpu: bool
    ) -> str | None:
        """None: its modules are those of the training backend; see `SupportsUnmergedAdapters`."""
        del model, lora, options, on_cpu
        return None

    def held_adapters(self) -> LoraConfig | None:
        """Settings of the adapters; see `SupportsUnmergedAdapters`."""
        return self._lora

    @property
    def weight_version(self) -> int:
        """The version last committed; 0 for the weights that the engine was built with."""
        return self._weight_version

    def weight_layout(self) -> WeightLayout:
        """Every rank holds every parameter whole; a tied embedding once."""
        dtype = str(self._model.dtype).removeprefix("torch.")
        shapes = {name: tuple(tensor.shape) for name, tensor in self._own.items()}
        layout = replicated_layout(shapes, range(self._topology.world_size), dtype=dtype)
        return layout_in_files(self._file_names, layout)

    def weight_buffers(self) -> Mapping[str, torch.Tensor]:
        """The model's own parameters, or what was adopted in their place; of stacked experts each matrix is a view."""
        return dict(self._buffers)

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The model's persistent buffers; see `SupportsBuffers`."""
        return tensors_in_files(self._file_names, persistent_buffers(self._buffer_owners))

    def adopt_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Uses these tensors in the place of those parameters', without a copy; see `SupportsWeightAdoption`.

        Raises:
            ReshardError: for a tensor that cannot stand in the place of a parameter, or experts of a layer that are not
                stacked as `weight_buffers()` are.
        """
        parts: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, tensor in weights.items():
            known = self._buffers.get(name)
            if _facts(tensor) is None or _facts(tensor) != _facts(known):
                raise ReshardError(
                    f"{show(name)} is {_describe(tensor)}, the model's is {_describe(known)}. Use one like "
                    "weight_buffers()'s"
                )
            parts[self._parameter_of[name]][name] = tensor
        used = {name: stack_of(self._own[name], self._views[name], each) for name, each in parts.items()}
        for name, tensor in used.items():
            self._parameters[name].data = tensor
        self._buffers.update(weights)

    def commit_weights(self, version: int) -> None:
        """Declares the weights complete and stamps the samples that follow.

        Raises:
            BackendError: between `release` and `resume`: there is no weight in memory.
        """
        check_version(version, BackendError)
        if any(not parameter.untyped_storage().nbytes() for parameter in self._parameters.values() if parameter.nbytes):
            raise BackendError("the weights were released. Call resume() and send them again before commit_weights()")
        self._weight_version = version
        self._has_weights = True

    def release(self) -> int:
        """Frees the weights; keys and values are freed after every `generate` anyway.

        Raises:
            BackendError: inside `HybridEngine.generation()`, where training weights were moved into these.
        """
        if hold_training_weights(self._parameters.values()):
            raise BackendError(
                "release() and close() would lose the training weights, which are inside the generation weights. Leave "
                'generation() first, or build the HybridEngine with training_weights="keep"'
            )
        freed = storage_bytes(self._parameters.values())
        for parameter in self._parameters.values():
            parameter.untyped_storage().resize_(0)
        self._has_weights = False
        return freed

    def resume(self) -> None:
        """Takes the weights' memory again; the contents must be sent again."""
        for parameter in self._parameters.values():
            parameter.untyped_storage().resize_(parameter.nbytes)

    def close(self) -> None:
        """Frees the model."""
        if not isinstance(self._model, Closed):
            self.release()
            self._model = self._parameters = self._own = self._views = self._buffers = cast("Any", Closed())

    @torch.no_grad()
    def generate(self, batch: TensorDict, sampling: SamplingParams) -> TensorDict:
        """Draws `sampling.n` responses to every prompt; see `RolloutBackend.generate`."""
        vocab_size = self._model.get_input_embeddings().weight.shape[0]
        if not self._has_weights:
            raise BackendError(
                "the weights were released. Call resume(), send them again and commit_weights() before generate()"
            )
        limits = {"vocab_size": vocab_size, "positions": self._positions}
        prompts = read_prompts(batch, sampling, **limits, ends=self._stop_token_ids)
        self._rope_limits.check_prompts(prompts.lengths.tolist(), sampling.max_new_tokens)
        strings = load_stop_strings(self._model.name_or_path, sampling)
        turns = list(self._turns(prompts, sampling))
        uniforms = draw_uniforms(batch["row_id"], sampling)
        num_samples, capacity = uniforms.shape
        tokens = torch.zeros(num_samples, capacity, dtype=torch.int64)
        logprobs = torch.zeros(num_samples, capacity, dtype=torch.float32)
        lengths = torch.zeros(num_samples, dtype=torch.int64)
        reasons = torch.full((num_samples,), LENGTH)
        for rows in turns:
            samples = (rows[:, None] * sampling.n + torch.arange(sampling.n)).flatten()
            width = int(prompts.lengths[rows].max())
            decoding = Decoding(self._model, self._stop_token_ids, sampling, strings)
            padded, failed = prompts.pad_left(rows, width), f"no memory to decode {len(rows)} rows of {width} tokens"
            with lack_of_memory_is_an_error(f"{failed}, cache_bytes={self._cache_bytes}", "Lower cache_bytes"):
                shared = (len(samples) - len(rows)) * width * _cache_bytes_per_token(self._model)
                cache = build_cache(self._model, width + capacity, shared_bytes=shared)
                decoding.run(*padded, uniforms[samples], cache)
            tokens[samples], logprobs[samples] = decoding.tokens.cpu(), decoding.logprobs.cpu()
            lengths[samples], reasons[samples] = decoding.lengths.cpu(), decoding.reasons.cpu()
        mask = torch.arange(capacity) < lengths[:, None]
        return build_responses(
            tokens[mask], logprobs[mask], lengths, reasons, n=sampling.n, version=self._weight_version
        )

    def _turns(self, prompts: Ragged, sampling: SamplingParams) -> Iterator[torch.Tensor]:
        """Rows that are decoded together: similar prompt lengths, keys and values within `cache_bytes`.

        Where a prefill writes the scores of attention, one layer after the other, they count, too. A row by itself may
        have more of them. Rows whose rotary embeddings have other frequencies are decoded apart.
        """
        order = prompts.lengths.argsort(stable=True, descending=True)
        start = 0
        while start < len(order):
            prompt = int(prompts.lengths[order[start]])
            tokens = prompt + sampling.max_new_tokens
            row_bytes = tokens * sampling.n * _cache_bytes_per_token(self._model)
            if row_bytes > self._cache_bytes:
                raise BackendError(
                    f"row {int(order[start])} needs {tokens} tokens x {sampling.n} samples = {row_bytes} bytes of keys "
                    f"and values, above cache_bytes={self._cache_bytes}. Raise cache_bytes, or lower n or "
                    "max_new_tokens"
                )
            stop = start + max(1, self._cache_bytes // (row_bytes + prompt**2 * _score_bytes(self._model)))
            ranges = [self._rope_limits.range_of(length) for length in prompts.lengths[order[start:stop]].tolist()]
            stop = start + ranges.count(ranges[0])  # of the longest prompts, which are first
            yield order[start:stop]
            start = stop


def _check_layers(model: Any) -> None:
    """Refuses recurrent layers: their state is of the padding too, and is not spread over the samples of a prompt."""
    name = repr(model.name_or_path)
    with errors_of("transformers", f"{name}, a {type(model).__name__}: its keys and values cannot be kept"):
        kinds = {type(layer) for layer in DynamicCache(config=model.config).layers} - _ATTENTION
    takes_keys = "past_key_values" in inspect.signature(model.forward).parameters
    if kinds or keeps_state(model) or not takes_keys:
        found = ", ".join(sorted(kind.__name__ for kind in kinds)) or "a state of its own"
        raise BackendError(
            f"{name}, a {type(model).__name__}, keeps {found}: backend 'transformers' shares only keys and values "
            "among the samples of a prompt. Choose a model with attention in all layers"
        )


def _cache_bytes_per_token(model: Any) -> int:
    """Bytes of keys and values that one token adds over all layers, which differ in some families."""
    layers = model.config.get_text_config().per_layer_config
    return int(2 * model.dtype.itemsize * sum(map(_key_width, layers)))


def _score_bytes(model: Any) -> int:
    """Bytes of a layer's scores of two tokens, at their peak."""
    settings = model.config.get_text_config()
    if settings._attn_implementation != "eager":
        return 0
    return int(max(layer.num_attention_heads for layer in settings.per_layer_config) * _SCORE_BYTES)


def _key_width(layer: Any) -> int:
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    return int(heads * (getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads))


def _facts(tensor: object) -> tuple[object, ...] | None:
    """Shape, strides, dtype and device; None for other objects."""
    if not isinstance(tensor, torch.Tensor):
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _describe(tensor: object) -> str:
    if not isinstance(tensor, torch.Tensor):
        return "absent" if tensor is None else repr(tensor)
    return f"a tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype} on {tensor.device}"
