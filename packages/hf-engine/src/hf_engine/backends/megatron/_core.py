"""The names of megatron-core that the backend uses, imported after the CPU hook is in place."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from hf_engine.backends.megatron._cpu import allow_cpu


@contextmanager
def quiet() -> Iterator[None]:
    """Hides megatron-core's warnings: libraries that it goes without, torch's renamed collectives, CUDA's settings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


allow_cpu()

with quiet():
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "GPTModel",
    "OptimizerConfig",
    "TransformerConfig",
    "finalize_model_grads",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_megatron_optimizer",
    "model_parallel_cuda_manual_seed",
    "parallel_state",
    "quiet",
]
