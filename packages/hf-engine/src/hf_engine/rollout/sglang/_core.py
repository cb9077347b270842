"""The names of SGLang that the backend uses. Import them from here: few of them are promised to others.

`HOOKED` are the functions that SGLang's own hooks replace, `PRIVATE` the attributes that are read or called under a
leading underscore. Tests look for each of them in the installed SGLang.
"""

from __future__ import annotations

from typing import Any

from hf_engine.backends.library_names import import_name

__all__ = ["END_TOKENS", "HOMES", "HOOKED", "PRIVATE"]

HOMES = {
    "BaseLayerWithLoRA": "sglang.srt.lora.layers",
    "CustomLogitProcessor": "sglang.srt.sampling.custom_logit_processor",
    "Engine": "sglang.srt.entrypoints.engine",
    "HookRegistry": "sglang.srt.plugins.hook_registry",
    "HookType": "sglang.srt.plugins.hook_registry",
    "MultiprocessingSerializer": "sglang.srt.utils",
    "Sampler": "sglang.srt.layers.sampler",
    "UpdateWeightsFromTensorReqInput": "sglang.srt.managers.io_struct",
    "register_sampler_backend": "sglang.srt.layers.sampler",
    "replace_submodule": "sglang.srt.utils",
}
"""The module of SGLang in which each name is."""
END_TOKENS = "sglang.srt.configs.model_config.ModelConfig._get_hf_eos_token_id"
"""Reads the ids that end every response."""
HOOKED = (END_TOKENS,)
PRIVATE = (("Sampler", "_sync_token_ids_across_tp"),)


def __getattr__(name: str) -> Any:
    """Imports a name of SGLang; see `import_name`."""
    return import_name(HOMES, name, __name__)
