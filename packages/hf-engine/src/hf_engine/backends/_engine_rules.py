"""Rules for the models that vLLM and SGLang run, by the models' files alone: no engine is imported."""

from __future__ import annotations

from typing import NoReturn

from hf_engine.backends._shapes import derive_layout
from hf_engine.model_directory import ModelDirectory, is_buffer
from hf_engine.resharding.tensor_parallel import layer_of
from hf_protocols.errors import ModelError
from hf_protocols.models import ModelShape

__all__ = [
    "SGLANG_EXPERTS",
    "check_sglang_runs",
    "check_vllm_runs",
    "has_experts",
    "refuse_wrapped",
    "require_known_layout",
]

SGLANG_EXPERTS = (
    "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "exaone_moe", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe",
    "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe",
)  # fmt: skip
"""Mixtures of experts that the loaders of SGLang 0.5.23 take, by tests; on a CPU it computes them wrongly."""
_VLLM_EXPERTS = (
    "ernie4_5_moe", "exaone_moe", "glm4_moe", "granitemoe", "llama4_text", "minimax_m2", "mixtral", "olmoe",
    "qwen2_moe", "qwen3_moe",
)  # fmt: skip
"""Mixtures of experts that followed their training in vLLM 0.32, by tests."""
_NOT_IN_SGLANG = ("bloom", "falcon")
"""Families that SGLang 0.5.23 runs neither by a class of its own nor by transformers'."""

_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Of vLLM 0.32's attention on a CPU; `build` asks the installed version."""
_ROUTED_ON_DEVICES = ("minimax_m2",)
"""Families that choose experts by a bias without groups: vLLM 0.32 takes their updates on a CPU and cannot generate."""
_DERIVED_HEAD_SIZE = ("qwen2",)
"""Families whose class in vLLM divides hidden_size by heads and ignores head_dim."""
_WRAPPED = (
    "arcee", "aria_text", "axk2", "cwm", "doge", "dots1", "flex_olmo", "glm", "gpt_bigcode", "gpt_neox",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "jais2", "jetmoe", "mellum", "nanbeige", "olmo", "olmo2", "olmo3", "phi",
    "phimoe", "seed_oss", "smollm3", "solar_open", "starcoder2", "vaultgemma",
)  # fmt: skip
"""Families of which vLLM 0.32 has no class of its own: it changes transformers' in place, for training, too.
`build` asks the installed version."""
_DIFFERS_IN_VLLM = ("apertus", "cohere2")
"""Families whose log-probs in vLLM 0.32 after an update were not those of transformers."""
_KEPT_BY_VLLM = ("gpt_oss",)
"""Families whose loader in vLLM 0.32 writes experts past an update, which then keeps the old ones."""
_OTHER = "Choose another model, or rollout backend 'transformers'"


def require_known_layout(model: ModelDirectory) -> ModelShape:
    """Sizes and parameters of a model whose weights an engine can be sent under the names in its files.

    Of a family that `ModelShape` knows, an engine is sent each rank's part; of another one whole parameters, of which
    the engine's own loader takes a part.

    Raises:
        BackendError: for a family of which files hold parameters merged or transposed, and for tensors that are neither
            parameters nor buffers of it.
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


def has_experts(shape: ModelShape) -> bool:
    """True for a mixture of experts, also of a family that `ModelShape` does not know."""
    return any(".experts." in name or len(size) == 3 for name, size in shape.parameters().items())


def check_vllm_runs(model: ModelDirectory, *, on_cpu: bool) -> ModelShape:
    """The model's shape, if vLLM runs it and takes its weights.

    Raises:
        BackendError: for a family, a head size or rotary embeddings that do not run.
    """
    shape, family = require_known_layout(model), model.config.get("model_type")
    if family in _WRAPPED:
        refuse_wrapped(model)
    if family in _DIFFERS_IN_VLLM:
        raise model.refusal(f"is a {model.architecture or 'model'}, which vLLM computes otherwise. {_OTHER}")
    if family in _KEPT_BY_VLLM:
        raise model.refusal(f"is a {model.architecture or 'model'}, whose experts vLLM keeps in an update. {_OTHER}")
    if family not in _VLLM_EXPERTS and has_experts(shape):
        raise model.refusal(
            f"is a mixture of experts of model_type={family!r}, which was not seen to follow its training in vLLM; it "
            f"takes those of {', '.join(_VLLM_EXPERTS)}. {_OTHER}"
        )
    if on_cpu and family in _ROUTED_ON_DEVICES:
        raise model.refusal(f"is a {model.architecture or 'model'}, whose routing vLLM has on devices only. {_OTHER}")
    if on_cpu and shape.head_dim not in _CPU_HEAD_SIZES:
        raise model.refusal(
            f"has head_dim={shape.head_dim}; vLLM on a CPU runs {list(_CPU_HEAD_SIZES)}. Choose another model, or "
            "rollout backend 'transformers'"
        )
    rope = model.text_config.get("rope_scaling") or model.text_config.get("rope_parameters") or {}
    if rope.get("rope_type", rope.get("type")) == "dynamic":
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


def refuse_wrapped(model: ModelDirectory) -> NoReturn:
    """Refuses a family that vLLM runs by transformers' own classes.

    Raises:
        BackendError: always.
    """
    raise model.refusal(
        f"is a {model.architecture or 'model'} of which vLLM has no class of its own: it would change transformers' in "
        f"the process that trains. {_OTHER}"
    )


def check_sglang_runs(model: ModelDirectory, *, on_cpu: bool) -> ModelShape:
    """The model's shape, if SGLang runs it.

    Raises:
        BackendError: for a family that SGLang does not run or whose files do not have its parameters, and for experts
            on a CPU or of a family that was not tried.
    """
    shape, family = require_known_layout(model), model.config.get("model_type")
    if family in _NOT_IN_SGLANG:
        raise model.refusal(f"is a {model.architecture or family}, which SGLang does not run. {_OTHER}")
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
