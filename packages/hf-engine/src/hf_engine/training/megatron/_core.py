"""The names of megatron-core that the backend uses. Import them from here: the CPU hook has to be in place first.

`PRIVATE` are the attributes that are read or called under a leading underscore. Tests look for each of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hf_engine.backends.library_names import import_name
from hf_engine.backends.versions import MEGATRON
from hf_engine.cpu_support.megatron import allow_cpu

__all__ = ["HOMES", "PRIVATE", "quiet"]

HOMES = {
    "DistributedDataParallel": "megatron.core.distributed",
    "DistributedDataParallelConfig": "megatron.core.distributed",
    "DistributedOptimizer": "megatron.core.optimizer.distrib_optimizer",
    "GPTModel": "megatron.core.models.gpt",
    "OptimizerConfig": "megatron.core.optimizer",
    "TransformerBlockSubmodules": "megatron.core.transformer.transformer_block",
    "TransformerConfig": "megatron.core.transformer.transformer_config",
    "finalize_model_grads": "megatron.core.distributed",
    "gather_from_sequence_parallel_region": "megatron.core.tensor_parallel",
    "get_forward_backward_func": "megatron.core.pipeline_parallel",
    "get_gpt_layer_local_spec": "megatron.core.models.gpt.gpt_layer_specs",
    "get_megatron_optimizer": "megatron.core.optimizer",
    "model_parallel_cuda_manual_seed": "megatron.core.tensor_parallel",
    "moe_utils": "megatron.core.transformer.moe",
    "parallel_state": "megatron.core",
}
PRIVATE = (
    ("DistributedOptimizer", "_get_main_param_and_optimizer_states"),
    ("DistributedOptimizer", "_get_model_param_range_map"),
    ("GPTModel", "_preprocess"),
    ("parallel_state", "_global_process_group_list"),
)


def __getattr__(name: str) -> Any:
    """Imports a name of megatron-core.

    Raises:
        AttributeError: for a name that the backend does not use.
        ModuleNotFoundError: if megatron-core is not installed.
        BackendError: for an unsupported version.
    """
    if name in HOMES:
        allow_cpu()
        with quiet():
            import megatron.core

            MEGATRON.check(megatron.core.__version__)
    with quiet():
        return import_name(HOMES, name, __name__)


@contextmanager
def quiet() -> Iterator[None]:
    """Hides megatron-core's warnings: libraries that it goes without, torch's renamed collectives, CUDA's settings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
