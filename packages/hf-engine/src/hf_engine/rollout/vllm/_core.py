"""The names of vLLM that the backend uses. Import them from here: few of them are promised to others.

`REPLACED` are the attributes that are given another value for a while, `PRIVATE` those that are read or set under a
leading underscore, `OF_INSTANCES` those of them that objects get as they are built. Tests look for each of them in the
installed vLLM.
"""

from __future__ import annotations

from typing import Any

from hf_engine.backends.library_names import import_name

__all__ = ["HOMES", "OF_INSTANCES", "PRIVATE", "REPLACED"]

HOMES = {
    "Base": "vllm.model_executor.models.transformers.base",
    "CPUAttentionBackend": "vllm.v1.attention.backends.cpu_attn",
    "EngineArgs": "vllm.engine.arg_utils",
    "LLMEngine": "vllm.v1.engine.llm_engine",
    "LoRAModel": "vllm.lora.lora_model",
    "LoRARequest": "vllm.lora.request",
    "LogitsProcessor": "vllm.v1.sample.logits_processor",
    "MaxLoRARanks": "vllm.config.lora",
    "PEFTHelper": "vllm.lora.peft_helper",
    "ParallelLMHead": "vllm.model_executor.layers.vocab_parallel_embedding",
    "RequestOutputKind": "vllm.sampling_params",
    "SKIP_LOAD_TENSORS": "vllm.model_executor.model_loader.reload.meta",
    "SamplingParams": "vllm",
    "UnquantizedFusedMoEMethod": "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method",
    "VocabParallelEmbedding": "vllm.model_executor.layers.vocab_parallel_embedding",
    "WeightTransferConfig": "vllm.config",
    "WeightTransferEngine": "vllm.distributed.weight_transfer",
    "WeightTransferEngineFactory": "vllm.distributed.weight_transfer",
    "WeightTransferInitInfo": "vllm.distributed.weight_transfer.base",
    "WeightTransferUpdateInfo": "vllm.distributed.weight_transfer.base",
    "Worker": "vllm.v1.worker.gpu_worker",
    "XIELU": "vllm.model_executor.layers.activation",
    "_LazyRegisteredModel": "vllm.model_executor.models.registry",
    "_ModelInfo": "vllm.model_executor.models.registry",
    "apertus": "vllm.model_executor.models",
    "core": "vllm.v1.engine",
    "current_platform": "vllm.platforms",
    "default_weight_loader": "vllm.model_executor.model_loader.weight_utils",
    "finalize_layerwise_reload": "vllm.model_executor.model_loader.reload",
    "get_layerwise_info": "vllm.model_executor.model_loader.reload.layerwise",
    "gpu_worker": "vllm.v1.worker",
    "initialize_layerwise_reload": "vllm.model_executor.model_loader.reload",
    "is_deferred_attention_layer": "vllm.model_executor.layers.attention",
    "parallel_state": "vllm.distributed",
    "process_dict_updates": "vllm.v1.sample.logits_processor.builtin",
    "replace_submodule": "vllm.lora.utils",
    "set_current_vllm_config": "vllm.config",
}
"""The module of vLLM in which each name is, or the package of a name that is a module."""
REPLACED = (
    ("Base", "_decorate_cls_for_torch_compile"),
    ("_LazyRegisteredModel", "inspect_model_cls"),
    ("apertus", "XIELU"),
    ("core", "freeze_gc_heap"),
    ("gpu_worker", "freeze_gc_heap"),
)
PRIVATE = (
    *(("parallel_state", f"_{name}") for name in ("TP", "ETP", "EP", "DCP", "PCP", "PP", "DP", "WORLD", "NODE_COUNT")),
    ("WeightTransferEngineFactory", "_registry"),
)
OF_INSTANCES = (
    ("vllm.v1.engine.core_client", "_finalizer"),
    ("vllm.v1.worker.gpu_worker", "_weight_update_active"),
    ("vllm.lora.worker_manager", "_adapter_manager"),
)
"""The module of each one's class, and its name."""


def __getattr__(name: str) -> Any:
    """Imports a name of vLLM; see `import_name`."""
    return import_name(HOMES, name, __name__)
