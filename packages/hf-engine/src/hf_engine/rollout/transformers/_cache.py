"""Keys and values of one batch of prompts and of their samples, in buffers of the final length.

Where it pays, the samples of a prompt share its keys and values: each has buffers for its own tokens, and attention
reads a prompt once for all of them. The weights of a token are those of a copy for each sample, to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = [
    "SHARING_FAMILIES",
    "SharedPromptCache",
    "SharedPromptLayer",
    "StaticLayer",
    "build_cache",
    "moves_rows_alone",
    "prompts_shared",
]

SHARING_FAMILIES = frozenset(
    {
        "apertus", "cohere", "ernie4_5", "ernie4_5_moe", "gemma", "glm4", "glm4_moe", "gpt2", "gpt_neox", "granite",
        "granitemoe", "llama", "minimax_m2", "mistral", "mixtral", "olmo2", "olmoe", "opt", "phi", "phi3", "phimoe",
        "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2",
    }
)  # fmt: skip
"""Model types whose attention gets the cached keys as they are, and sees all of them, as tests show for each."""
LEAST_SHARED_BYTES = 2_500_000
"""Least bytes of a layer's prompt keys and values, over all samples of a prompt but its first, for which sharing is
faster than copies."""


class StaticLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one layer in buffers of the final length: attention reads the filled part, nothing grows."""

    def __init__(self, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._capacity = capacity
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends [b, heads, q, head_dim]; the prefill is kept as it comes until it is spread over the samples."""
        if self._buffers is None:
            self.keys, self.values = key_states, value_states
            self.is_initialized = True
        else:
            start = self._filled()[0].shape[-2]
            stop = start + key_states.shape[-2]
            keys, values = self._buffers
            keys[:, :, start:stop], values[:, :, start:stop] = key_states, value_states
            self.keys, self.values = keys[:, :, :stop], values[:, :, :stop]
        return self._filled()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Gives every prompt's keys and values to its samples, in buffers that hold the whole response."""
        keys, values = (self._spread(states, repeats) for states in self._filled())
        self._hold(keys, values, self.get_seq_length())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Puts the kept rows at the front of the buffers; only what is not in its place is moved."""
        assert self._buffers is not None, "the samples of a prompt are spread before any of them finishes"
        length = self._filled()[0].shape[-2]
        places = (indices != torch.arange(len(indices), device=indices.device)).nonzero().squeeze(-1)
        for states in self._filled():
            states[places] = states[indices[places]]
        keys, values = (buffer[: len(indices)] for buffer in self._buffers)
        self._hold(keys, values, length)

    def _filled(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None and self.values is not None, "the prefill comes first"
        return self.keys, self.values

    def _hold(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        self._buffers = (keys, values)
        self.keys, self.values = keys[:, :, :length], values[:, :, :length]

    def _spread(self, states: torch.Tensor, repeats: int) -> torch.Tensor:
        rows, heads, length, size = states.shape
        buffer = states.new_empty(rows, repeats, heads, self._capacity, size)
        buffer[:, :, :, :length] = states[:, None]
        return buffer.flatten(0, 1)


class SharedPromptLayer(StaticLayer):  # type: ignore[no-untyped-call]
    """Keys and values of the prompts, and of the samples' own tokens in buffers, which `update` returns."""

    prompts: tuple[torch.Tensor, torch.Tensor] | None = None
    """Keys and values [prompts, heads, P, head_dim], once the samples have tokens of their own."""

    def get_seq_length(self) -> int:
        """Tokens of a prompt and of a sample."""
        if not self.is_initialized:
            return 0
        prompt = 0 if self.prompts is None else self.prompts[0].shape[-2]
        return int(prompt + self._filled()[0].shape[-2])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Keeps the prompts as they are, and makes room for the samples' tokens."""
        keys, values = (states.contiguous() for states in self._filled())  # a step would copy them otherwise
        self.prompts = keys, values
        room = self._capacity - self.prompts[0].shape[-2]
        buffers = [
            states.new_empty(len(states) * repeats, states.shape[1], room, states.shape[-1]) for states in self.prompts
        ]
        self._hold(buffers[0], buffers[1], 0)


class SharedPromptCache(DynamicCache):
    """A cache of `SharedPromptLayer` alone, which knows the prompt of every sample."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Begins the samples, `repeats` of each prompt."""
        super().batch_repeat_interleave(repeats)
        keys, _ = self._prompts(self.layers[0])
        self._place(torch.arange(len(keys), device=keys.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps some samples, in any order, and the prompts that still have one."""
        super().batch_select_indices(indices)
        kept, owners = torch.unique(self._owners[indices], return_inverse=True)
        if len(kept) < self._num_prompts:
            for layer in self.layers:
                assert isinstance(layer, SharedPromptLayer), "it has no others"
                keys, values = self._prompts(layer)
                layer.prompts = (keys[kept], values[kept])
        self._place(owners)

    def attend(
        self,
        layer: SharedPromptLayer,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
    ) -> torch.Tensor:
        """Attention of one token of each sample to its prompt and to its own tokens.

        Args:
            layer: of this cache, which holds the token itself already.
            query: [rows, heads, 1, head_dim].
            mask: [rows, 1, 1, P + T], bool or a term of the scores; None: all is seen.
            scaling: of the scores; None: 1 / sqrt(head_dim).

        Returns:
            [rows, 1, heads, size of a value].
        """
        (prompt_keys, prompt_values), keys, values = self._prompts(layer), *layer._filled()
        rows, heads, _, size = query.shape
        num_kv = keys.shape[1]
        queries = (query * (size**-0.5 if scaling is None else scaling)).view(rows, num_kv, heads // num_kv, size)
        of_prompts = self._gather(self._group(queries) @ prompt_keys.transpose(-1, -2), heads // num_kv)
        scores = torch.cat([of_prompts, queries @ keys.transpose(-1, -2)], dim=-1)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            scores = scores + mask
        weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
        at_prompts, at_own = weights.tensor_split([prompt_keys.shape[-2]], dim=-1)
        found: torch.Tensor = self._gather(self._group(at_prompts) @ prompt_values, heads // num_kv) + at_own @ values
        return found.reshape(rows, 1, heads, -1)

    def _place(self, owners: torch.Tensor) -> None:
        """Notes the prompt of every sample, and its place among as many for each prompt as any has."""
        counts = owners.bincount()
        self._owners, self._num_prompts, self._most = owners, len(counts), int(counts.max())
        order = owners.argsort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(owners), device=owners.device) - (counts.cumsum(0) - counts)[owners[order]]
        places += owners * self._most
        follow = torch.equal(places, torch.arange(self._num_prompts * self._most, device=owners.device))
        self._places = None if follow else places

    def _group(self, states: torch.Tensor) -> torch.Tensor:
        """[rows, kv, repeats, n] of samples as [prompts, kv, most * repeats, n], zeros where a prompt has fewer."""
        if self._places is not None:
            whole = states.new_zeros(self._num_prompts * self._most, *states.shape[1:])
            states = whole.index_copy(0, self._places, states)
        _, num_kv, repeats, size = states.shape
        grouped = states.reshape(self._num_prompts, self._most, num_kv, repeats, size).transpose(1, 2)
        return grouped.flatten(2, 3)

    def _gather(self, grouped: torch.Tensor, repeats: int) -> torch.Tensor:
        """Undoes `_group`."""
        num_prompts, num_kv, _, size = grouped.shape
        states = grouped.view(num_prompts, num_kv, self._most, repeats, size).transpose(1, 2).flatten(0, 1)
        return states if self._places is None else states[self._places]

    @staticmethod
    def _prompts(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert layer.prompts is not None, "the samples have begun"
        found: tuple[torch.Tensor, torch.Tensor] = layer.prompts
        return found


def build_cache(model: Any, capacity: int, *, shared_bytes: int) -> DynamicCache:
    """A cache of the kinds of layers that the model's config asks for; full attention gets static buffers.

    Args:
        model: of transformers.
        capacity: tokens of the longest prompt and of the longest response.
        shared_bytes: keys and values of the prompts in all layers, for every sample of a prompt but the first.
    """
    cache = DynamicCache(config=model.config)
    if shared_bytes and shared_bytes >= LEAST_SHARED_BYTES * len(cache.layers) and _may_share(model, cache):
        cache = SharedPromptCache(config=model.config)
        cache.layers = [SharedPromptLayer(capacity) for _ in cache.layers]
        return cache
    cache.layers = [StaticLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def moves_rows_alone(cache: DynamicCache) -> bool:
    """True where `batch_select_indices` moves samples into free places, and copies prompts only when one has ended."""
    return all(isinstance(layer, StaticLayer) for layer in cache.layers)


def _may_share(model: Any, cache: DynamicCache) -> bool:
    settings = model.config.get_text_config()
    if model.dtype != torch.float32:
        return False  # scores would be rounded to 16 bits, which torch's own attention keeps in 32
    is_full = all(type(layer) is DynamicLayer for layer in cache.layers)
    return is_full and settings.model_type in SHARING_FAMILIES and settings._attn_implementation == "sdpa"


@contextmanager
def prompts_shared(cache: DynamicCache) -> Iterator[None]:
    """Inside, decoding with a `SharedPromptCache` has its attention. Of other caches and models nothing changes."""
    if not isinstance(cache, SharedPromptCache):
        yield
        return
    functions: Any = ALL_ATTENTION_FUNCTIONS
    attend_apart = functions["sdpa"]

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        number = getattr(module, "layer_idx", None)
        layer = cache.layers[number] if number is not None and number < len(cache.layers) else None
        if layer is None or key is not layer.keys:  # another model in this process
            found: tuple[torch.Tensor, None] = attend_apart(module, query, key, value, mask, **options)
            return found
        return cache.attend(layer, query, mask, options.get("scaling")), None

    functions["sdpa"] = attend
    try:
        yield
    finally:
        del functions["sdpa"]
