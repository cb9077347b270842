"""Options that an engine is started with: a model, SGLang's own, and the bytes of the cache per token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_engine.backends.base import SamplingParams
from hf_engine.model_directory import (
    ModelDirectory,
    check_model_directory,
    read_end_of_sequence_ids,
    read_model_directory,
)
from hf_engine.rollout.engine_rules import SGLANG_RESERVED, check_sglang_runs, window_override
from hf_engine.rollout.sglang._plugins import LOADER, SAMPLER
from hf_protocols.errors import BackendError
from hf_protocols.validation import show

__all__ = ["EngineModel", "build_options", "check_cache_rows", "check_more"]

_OURS: dict[str, Any] = {
    "sampling_backend": SAMPLER,
    "enable_custom_logit_processor": True,
    "preferred_sampling_params": None,
    "speculative_algorithm": None,
    "custom_weight_loader": [LOADER],
    "skip_tokenizer_init": True,
    "trust_remote_code": False,
    "host": "127.0.0.1",
}
"""Without these samples are not drawn as elsewhere, or weights not loaded."""
_BY_ARGUMENTS = (
    "model_path",
    "dtype",
    "random_seed",
    "tp_size",
    "context_length",
    "max_total_tokens",
    "max_running_requests",
)
"""Options of SGLang that the backend's other arguments set."""
_OVERRIDES = "json_model_override_args"
_DEFAULTS: dict[str, Any] = {
    "skip_server_warmup": True,
    "grammar_backend": "none",
    "sleep_on_idle": True,  # else it asks for work without a pause, on a core that training needs
    "log_level": "error",
}
_GPU: dict[str, Any] = {"enable_memory_saver": True}
_CPU: dict[str, Any] = {"device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True}


class EngineModel:
    """A model on disk, and its sizes.

    Args:
        model: directory or hub name.
        max_positions: prompt and response together; None: the model's.

    Raises:
        BackendError: if there is none, its parameters are not known here, its ends of a response are none, or SGLang
            does not compute it as transformers does.
    """

    def __init__(self, model: str | Path, max_positions: int | None = None) -> None:
        self.name = str(model)
        files = read_model_directory(model)
        self.directory = files.path
        self.shape = check_sglang_runs(files, on_cpu=not torch.cuda.is_available(), max_positions=max_positions)
        self.overrides = config_overrides(files)
        self.stop_token_ids = read_end_of_sequence_ids(files)
        check_model_directory(files)

    def cache_token_bytes(self, tp_size: int, dtype: str) -> int:
        """Bytes of keys and values that one token adds on one rank; ranks beyond the key-value heads repeat them."""
        heads = -(-self.shape.num_kv_heads // tp_size)
        itemsize: int = getattr(torch, dtype).itemsize
        return 2 * self.shape.num_layers * heads * self.shape.head_dim * itemsize


def config_overrides(model: ModelDirectory) -> dict[str, Any]:
    """Keys of the config that SGLang must see otherwise, to compute what transformers computes.

    SGLang 0.5.23's own configuration of OLMo 3 has the base of positions at the top alone, where transformers 5 does
    not write it.
    """
    rope = model.config.get("rope_parameters")
    if model.config.get("model_type") != "olmo3" or not isinstance(rope, Mapping):
        return window_override(model)
    full = rope.get("full_attention", rope)
    stretched = None if full.get("rope_type", "default") == "default" else dict(full)
    return {"rope_theta": full["rope_theta"], "rope_scaling": stretched}


def check_more(more: object) -> None:
    """Refuses what is not a table of SGLang's server arguments, and those that are set here.

    Raises:
        BackendError: naming them.
    """
    if not isinstance(more, Mapping):
        raise BackendError(f"engine_options={show(more)}. Use a table of SGLang's server arguments")
    if taken := sorted(more.keys() & {*_BY_ARGUMENTS, *_OURS}):
        raise BackendError(
            f"engine_options={dict(more)} would change {', '.join(taken)}, which is set by the other arguments of the "
            "backend, or must be as it is. Leave it out"
        )


def check_cache_rows(lengths: Sequence[int], sampling: SamplingParams, cache_tokens: int, token_bytes: int) -> None:
    """Refuses prompts whose keys and values the cache does not hold.

    Raises:
        BackendError: naming the row.
    """
    held = cache_tokens - SGLANG_RESERVED
    for row, length in enumerate(lengths):
        if (tokens := length + sampling.max_new_tokens) > held:
            raise BackendError(
                f"row {row} needs {tokens} tokens x {token_bytes} bytes of keys and values, of which "
                f"the cache holds {held} tokens. Raise cache_bytes or lower max_new_tokens"
            )


def build_options(
    model: EngineModel,
    *,
    dtype: str,
    seed: int,
    tp_size: int,
    positions: int,
    cache_bytes: int,
    max_rows: int,
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """SGLang's server arguments.

    Raises:
        BackendError: for a cache that holds no token, or options in `more` that are set here.
    """
    check_more(more)
    token_bytes = model.cache_token_bytes(tp_size, dtype)
    tokens = cache_bytes // token_bytes
    if tokens <= SGLANG_RESERVED:
        raise BackendError(
            f"cache_bytes={cache_bytes} holds {tokens} tokens of {token_bytes} bytes of keys and values each. Raise "
            "cache_bytes"
        )
    values = (str(model.directory), dtype, seed % (1 << 31), tp_size, positions + SGLANG_RESERVED, tokens, max_rows)
    fixed = dict(zip(_BY_ARGUMENTS, values, strict=True)) | _OURS
    if model.overrides:
        if _OVERRIDES in more:
            raise BackendError(
                f"engine_options has {_OVERRIDES}, which is {model.overrides} for {show(model.name)}. Leave it out"
            )
        fixed[_OVERRIDES] = json.dumps(model.overrides)
    return {**_DEFAULTS, **(_GPU if torch.cuda.is_available() else _CPU), **more, **fixed}
