"""The entry point that SGLang loads when it starts.

In processes of our engines it registers our sampler and leaves the end of a response to its request alone. On the CPU
platform it adds what `hf_engine.cpu_support` has for engines, and in other processes what that has for servers.
"""

from __future__ import annotations

import os

from hf_engine.cpu_support.sglang_plugins import is_platform_chosen, register_for_engines, register_for_servers

__all__ = ["LOADER", "OURS", "SAMPLER", "register"]

OURS = "HF_ENGINE_SGLANG"
"""Environment variable that marks our engines' processes."""
LOADER = "hf_engine.rollout.sglang._loader.load_staged"
"""Path by which SGLang finds the loader of shards."""
SAMPLER = "pytorch"
"""The sampling backend whose sampler ours takes the place of: on a CPU SGLang accepts no other."""


def register() -> None:
    """Puts our sampler in its place, without ends of SGLang's own; on a CPU keeps heads as they are on a GPU, and gives
    other servers seeds.
    """
    if OURS in os.environ:
        from hf_engine.rollout.sglang._core import END_TOKENS, HookRegistry, HookType, register_sampler_backend
        from hf_engine.rollout.sglang._sampler import DrawingSampler

        register_sampler_backend(SAMPLER, DrawingSampler)
        # The ids of two files together, outside the vocabulary too. `ignore_eos` would ignore a request's stop tokens.
        HookRegistry.register(END_TOKENS, lambda _: set(), HookType.REPLACE)
        if is_platform_chosen():
            register_for_engines()
    elif is_platform_chosen():
        register_for_servers()
