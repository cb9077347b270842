"""Entry points that SGLang loads when it starts.

In processes of our engines they register our sampler and leave the end of a response to its request alone. In other
processes they add the parts that the CPU platform needs, if it was chosen.
"""

from __future__ import annotations

import os

__all__ = ["LOADER", "OURS", "PLATFORM", "SAMPLER", "activate_platform", "register"]

OURS = "HF_ENGINE_SGLANG"
"""Environment variable that marks our engines' processes."""
LOADER = "hf_engine.backends.sglang._loader.load_staged"
"""Path by which SGLang finds the loader of shards."""
PLATFORM = "hybridflow_cpu"
"""Name of the CPU platform, chosen with SGLANG_PLATFORM."""
SAMPLER = "pytorch"
"""The sampling backend whose sampler ours takes the place of: on a CPU SGLang accepts no other."""

_PINNING = (
    "backend.torch_backend.TorchNativeLoRABackend.prepare_lora_batch",
    "lora_manager.LoRAManager.init_state",
    "lora_manager.LoRAManager.update_lora_info",
)
"""Functions of SGLang's adapters that pin memory."""


def activate_platform() -> str | None:
    """Returns the path of the CPU platform; None unless it was asked for by name."""
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM:
        return None
    from hf_engine.backends.sglang._torchvision import install_stand_in

    install_stand_in()
    return "hf_engine.backends.sglang._cpu_platform:CpuPlatform"


def register() -> None:
    """Puts our sampler in its place, without ends of SGLang's own; on a CPU keeps heads as they are on a GPU, and gives
    other servers seeds.
    """
    if OURS in os.environ:
        from sglang.srt.layers.sampler import register_sampler_backend
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from hf_engine.backends.sglang._sampler import DrawingSampler

        register_sampler_backend(SAMPLER, DrawingSampler)
        # The ids of two files together, outside the vocabulary too. `ignore_eos` would ignore a request's stop tokens.
        HookRegistry.register(
            "sglang.srt.configs.model_config.ModelConfig._get_hf_eos_token_id", lambda _: set(), HookType.REPLACE
        )
        if os.environ.get("SGLANG_PLATFORM") == PLATFORM:
            # On a CPU SGLang would pad heads that do not divide evenly, where loaders for other devices replicate them.
            HookRegistry.register(
                "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp",
                lambda config, *_: config,
                HookType.REPLACE,
            )
            # It computes adapters there, on memory that it would pin for a device.
            from hf_engine.backends.sglang._adapters import unpinned

            for function in _PINNING:
                HookRegistry.register(f"sglang.srt.lora.{function}", unpinned, HookType.AROUND)
    elif os.environ.get("SGLANG_PLATFORM") == PLATFORM:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from hf_engine.backends.sglang._cpu_seeds import register_seeds

        register_seeds(HookRegistry, HookType.REPLACE)
