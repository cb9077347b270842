"""Rules for the models that vLLM and SGLang run, by the models' files alone: no engine is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_engine.model_directory import ModelDirectory, is_buffer
from hf_engine.models.shapes import derive_layout
from hf_engine.resharding.tensor_parallel import layer_of
from hf_protocols.errors import ModelError
from hf_protocols.models import ModelShape

__all__ = [
    "SGLANG_EXPERTS",
    "SGLANG_RESERVED",
    "check_sglang_runs",
    "check_vllm_runs",
    "find_sglang_fault",
    "has_experts",
    "require_known_layout",
    "window_override",
]

SGLANG_EXPERTS = (
    "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "exaone_moe", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe",
    "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe",
)  # fmt: skip
"""Mixtures of experts that the loaders of SGLang 0.5.23 take, by tests; on a CPU it computes them wrongly."""
SGLANG_RESERVED = 6
"""Positions, and tokens of the cache, that SGLang keeps to itself: it refuses a prompt that leaves it fewer."""
_NOT_IN_SGLANG = ("bloom", "falcon")
"""Families that SGLang 0.5.23 runs neither by a class of its own nor by transformers'."""
_WINDOWS_IN_SGLANG = ("cohere2", "exaone4", "exaone_moe", "gemma2", "gemma3_text", "gpt_oss", "olmo3")
"""Families whose sliding windows SGLang 0.5.23 computes. It ignores the windows of all other families."""
_DEVICES_IN_SGLANG = ("exaone4",)
"""Families for which SGLang 0.5.23 wants an attention that runs on devices only."""
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
"""Keys of bounds on logits, for which SGLang 0.5.23 has kernels on devices only."""

_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Of vLLM 0.32's attention on a CPU; `build` asks the installed version."""
_ROUTED_ON_DEVICES = ("minimax_m2",)
"""Families that choose experts by a bias without groups: vLLM 0.32 takes their updates on a CPU and cannot generate."""
_NOT_IN_VLLM = ("phimoe",)
"""Families whose experts vLLM 0.32 builds from transformers' and fails to run."""
_DERIVED_HEAD_SIZE = ("qwen2",)
"""Families whose class in vLLM divides hidden_size by heads and ignores head_dim."""
_CPU_EXPERT_SIZE = 32
"""Sizes of experts on one rank are multiples of it in vLLM 0.32's kernel on a CPU."""
_UNPADDED_EXPERTS = ("gpt_oss",)
"""Families whose experts vLLM does not fill up to such a size: their gates and rows alternate."""
_CPU_LATENT_SIZE = 576
"""kv_lora_rank + qk_rope_head_dim of the only kernel that vLLM 0.32 has for latent attention on a CPU."""
_OTHER = "Choose another model, or rollout backend 'transformers'"


def require_known_layout(model: ModelDirectory) -> ModelShape:
    """Sizes and parameters of a model whose weights an engine can be sent under the names in its files.

    Of a family that `ModelShape` knows, an engine is sent each rank's part; of another one whole parameters, of which
    the engine's own loader takes a part.

    Raises:
        BackendError: if the family's files merge or transpose parameters, and for tensors that are neither parameters
            nor buffers of the model.
    """
    try:
        shape, buffers = derive_layout(model)
    except ModelError as error:
        raise type(error)(f"{error}. {_OTHER}") from error
    if shape.is_generic and model.tensors:
        names, held = shape.parameters().keys() | buffers, {name for name in model.tensors if not is_buffer(name)}
        if model.num_extra_layers:  # neither trained nor used to generate
            held = {name for name in held if (layer_of(name) or 0) < shape.num_layers}
        if merged := sorted(names - held):
            raise model.refusal(f"its files hold {merged[0]!r} in other parts or under another name. {_OTHER}")
        tied = {"lm_head.weight"} if shape.tie_embeddings else set()
        if others := sorted(held - names - tied):
            raise model.refusal(f"its files hold {others[0]!r}, for which its family has no place. {_OTHER}")
    return shape


def window_override(model: ModelDirectory) -> dict[str, Any]:
    """The `sliding_window` that both engines must see, where it differs from the file's; else empty.

    vLLM 0.32 and SGLang 0.5.23 let a token of Cohere 2 attend to `sliding_window` tokens before it; transformers counts
    the token, too.
    """
    window = model.config.get("sliding_window")
    return {"sliding_window": window - 1} if model.config.get("model_type") == "cohere2" and window else {}


def has_experts(shape: ModelShape) -> bool:
    """True for a mixture of experts, also of a family that `ModelShape` does not know."""
    return any(".experts." in name or len(size) == 3 for name, size in shape.parameters().items())


def check_vllm_runs(model: ModelDirectory, *, on_cpu: bool, gen_tp_size: int = 1) -> ModelShape:
    """The model's shape, if vLLM runs it and takes its weights.

    Args:
        model: as it was read.
        on_cpu: whether ranks run on host processors.
        gen_tp_size: ranks of a replica.

    Raises:
        BackendError: for a family, a head size, a size of experts or rotary embeddings that do not run.
    """
    shape, family = require_known_layout(model), model.config.get("model_type")
    if family in _NOT_IN_VLLM:
        raise model.refusal(f"is a {model.architecture or family}, which vLLM does not run. {_OTHER}")
    if on_cpu and family in _ROUTED_ON_DEVICES:
        raise model.refusal(f"is a {model.architecture or 'model'}, whose routing vLLM has on devices only. {_OTHER}")
    is_latent = model.text_config.get("kv_lora_rank") is not None
    if is_latent:
        _check_latent(model, on_cpu=on_cpu)
    if on_cpu and not is_latent and shape.head_dim not in _CPU_HEAD_SIZES:
        raise model.refusal(
            f"has head_dim={shape.head_dim}; vLLM on a CPU runs {list(_CPU_HEAD_SIZES)}. Choose another model, or "
            "rollout backend 'transformers'"
        )
    if on_cpu and has_experts(shape):
        _check_experts(model, shape, gen_tp_size)
    if _rope_of(model)[0] == "dynamic":
        # Seen with 0.32: it has embeddings for max_position_embeddings positions only, and reads beyond them.
        raise model.refusal(
            "has rope_type=dynamic; vLLM computes it without the stretched positions. Choose another model, or rollout "
            "backend 'transformers'"
        )
    derived = shape.hidden_size // shape.num_heads
    if shape.family in _DERIVED_HEAD_SIZE and shape.head_dim != derived:
        raise model.refusal(
            f"vLLM would build it with heads of [{derived}], its config says {shape.head_dim}: vLLM's class of "
            f"{shape.family} derives it. Choose another model, or rollout backend 'transformers'"
        )
    return shape


def _check_experts(model: ModelDirectory, shape: ModelShape, gen_tp_size: int) -> None:
    """Sizes of experts that vLLM's kernel on a CPU has.

    Raises:
        BackendError: for a hidden size, or rows of an expert on one rank, that are not multiples of the kernel's.
    """
    if shape.hidden_size % _CPU_EXPERT_SIZE:
        raise model.refusal(
            f"has hidden_size={shape.hidden_size}; vLLM on a CPU runs experts where it is a multiple of "
            f"{_CPU_EXPERT_SIZE}. {_OTHER}"
        )
    rows = model.text_config.get("intermediate_size") or 0
    if model.config.get("model_type") in _UNPADDED_EXPERTS and rows % (_CPU_EXPERT_SIZE * gen_tp_size):
        raise model.refusal(
            f"has experts of intermediate_size={rows}, {rows / gen_tp_size:g} on each rank with "
            f"gen_tp_size={gen_tp_size}; vLLM on a CPU runs multiples of {_CPU_EXPERT_SIZE}. Lower gen_tp_size, or "
            "choose another model, or rollout backend 'transformers'"
        )


def _check_latent(model: ModelDirectory, *, on_cpu: bool) -> None:
    """Latent attention, by experiments with vLLM 0.32 on a CPU; on a GPU it has other kernels, which were not tried.

    Raises:
        BackendError: for sizes without a kernel, and for positions that vLLM computes otherwise.
    """
    kind, rope = _rope_of(model)
    if kind == "yarn" and rope.get("truncate") is False:
        raise model.refusal(f"has truncate=false in rope_parameters, which vLLM ignores in latent attention. {_OTHER}")
    if not on_cpu:
        return
    sizes = [model.text_config.get(key) or 0 for key in ("kv_lora_rank", "qk_rope_head_dim")]
    if sum(sizes) != _CPU_LATENT_SIZE:
        raise model.refusal(
            f"has kv_lora_rank={sizes[0]} and qk_rope_head_dim={sizes[1]}; vLLM on a CPU runs latent attention where "
            f"their sum is {_CPU_LATENT_SIZE}. {_OTHER}"
        )
    if kind != "yarn":
        # Seen: the kernel takes the rotated part of a head for memory without gaps. Of yarn torch computes it.
        raise model.refusal(
            "has latent attention without rope_type='yarn': on a CPU its log-probs in vLLM are 0.8 nats off those of "
            f"transformers. {_OTHER}"
        )


def _rope_of(model: ModelDirectory) -> tuple[Any, Mapping[str, Any]]:
    """Kind and keys of the positions' embeddings."""
    rope = model.text_config.get("rope_scaling") or model.text_config.get("rope_parameters") or {}
    return rope.get("rope_type", rope.get("type")), rope


def find_sglang_fault(model: ModelDirectory, shape: ModelShape, *, on_cpu: bool, positions: int) -> str | None:
    """Says what of a model SGLang leaves out or does not run, and what to choose; None where nothing is known.

    Args:
        model: as it was read.
        shape: its sizes.
        on_cpu: whether the engine runs on host processors.
        positions: of the engine, prompt and response together.
    """
    family = model.config.get("model_type")
    name = model.architecture or family
    if family in _NOT_IN_SGLANG:
        return f"is a {name}, which SGLang does not run. {_OTHER}"
    if "lm_head.bias" in shape.parameters():
        return f"has a bias in its output layer, which SGLang leaves out. {_OTHER}"
    from hf_engine.models.causal_lm import read_text_config

    config = read_text_config(model)
    window = None if family in _WINDOWS_IN_SGLANG else _find_window(config)
    if window is not None and window < positions:  # up to as many tokens all is the same with the window and without
        return (
            f"has sliding_window={window}, which SGLang leaves out: sequences of more tokens would be wrong without an "
            f"error. Let it have at most {window} positions (rollout.options.max_positions, or the server's "
            "--context-length), or choose rollout backend 'transformers'"
        )
    if on_cpu and family in _DEVICES_IN_SGLANG:
        return f"is a {name}, which SGLang runs on devices only. {_OTHER}"
    if on_cpu and (caps := [key for key in _CAPS if getattr(config, key, None)]):
        return f"has {caps[0]} in its configuration, which SGLang has on devices only. {_OTHER}"
    return None


def _find_window(config: Any) -> int | None:
    layers = getattr(config, "layer_types", None) or ["sliding_attention"]
    if "sliding_attention" not in layers or not getattr(config, "use_sliding_window", True):
        return None
    return getattr(config, "sliding_window", None) or None


def check_sglang_runs(model: ModelDirectory, *, on_cpu: bool, max_positions: int | None = None) -> ModelShape:
    """The model's shape, if SGLang computes it as transformers does.

    Args:
        model: as it was read.
        on_cpu: whether ranks run on host processors.
        max_positions: of the engine, prompt and response together; None: the model's.

    Raises:
        BackendError: for a family that SGLang does not run or whose files do not have its parameters, for what SGLang
            leaves out, and for experts on a CPU or of a family that was not tried.
    """
    shape, family = require_known_layout(model), model.config.get("model_type")
    if fault := find_sglang_fault(model, shape, on_cpu=on_cpu, positions=max_positions or shape.max_positions):
        raise model.refusal(fault)
    if not has_experts(shape):
        return shape
    if on_cpu:
        # Seen with 0.5.23: every token was 0, and nothing was said.
        raise model.refusal(
            "is a mixture of experts: SGLang's experts are wrong on a CPU without an error. Choose a dense model, or "
            "rollout backend 'transformers'"
        )
    if family not in SGLANG_EXPERTS:
        raise model.refusal(
            f"is a mixture of experts of model_type={family!r}, whose weights SGLang's loader was not seen to take; it "
            f"takes those of {', '.join(SGLANG_EXPERTS)}. {_OTHER}"
        )
    return shape
