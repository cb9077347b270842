"""Models of which packed rows equal separate ones, and what their rows cost: decided once for each model."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from hf_engine.models.attention import is_capped
from hf_engine.models.rope import find_rope_limits
from hf_engine.training.shared_prompts import MASK_BYTES, PromptSharing
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_engine.backends.base import Head
    from hf_engine.backends.train_config import TrainConfig
    from hf_engine.training.micro_batches import SequenceBatch

__all__ = ["EXACT_FAMILIES", "SharedPrompts", "find_obstacle"]

EXACT_FAMILIES = frozenset(
    {
        "apertus", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "exaone4",
        "exaone_moe", "falcon", "gemma", "gemma2", "gemma3_text", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2",
        "gpt_neox", "gpt_oss", "granite", "granitemoe", "llama", "llama4_text", "minimax_m2", "mistral", "mixtral",
        "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
        "smollm3", "stablelm", "starcoder2",
    }
)  # fmt: skip
"""Model types whose packed rows equal separate ones, as tests show for each of them."""

_SCORE_BYTES = 4
"""Of one score of a head that `"eager"` attention keeps for the backward pass; with a cap it keeps another 4."""
_KEPT_OUTPUTS = 2
"""Numbers that a token keeps for the backward pass, for each that a product with weights returns."""


def find_obstacle(model: Any, config: TrainConfig) -> str | None:
    """Reason for which rows of a model stay apart; None where packed rows compute the same."""
    settings = model.config.get_text_config()
    family = settings.model_type
    if getattr(settings, "alibi", False) or family in ("bloom", "mpt"):
        return f"a {type(model).__name__} biases attention by the columns of a row (ALiBi)"
    if family not in EXACT_FAMILIES:
        return f"packed rows are not tested with model_type={show(family)}"
    if getattr(settings, "attn_temperature_tuning", False):
        return f"a {type(model).__name__} with attn_temperature_tuning scales attention by the columns of a row"
    if (varying := find_rope_limits(settings).rope_type) is not None:
        return f"positions of rope_type={show(varying)} depend on the longest row of a micro-batch"
    if config.lora is not None and config.lora.dropout:
        return f"model.lora.dropout={config.lora.dropout} drops inputs of each row by itself"
    return None


def _estimate(model: Any, score_memory: float, *, always: bool) -> PromptSharing:
    """Costs of a model's rows, from the sizes of its parameters before they are sharded, and of `_measure_scores`."""
    settings = model.config.get_text_config()
    layers, heads, hidden = settings.num_hidden_layers, settings.num_attention_heads, settings.hidden_size
    size = getattr(settings, "head_dim", None) or hidden // heads
    kinds = len(set(getattr(settings, "layer_types", None) or [""]))
    return PromptSharing.estimate(
        attended=layers * heads * size,
        passed=_count_passed(model),
        pair_bytes=0 if settings._attn_implementation == "flex_attention" else kinds * MASK_BYTES,
        token_bytes=4 * layers * hidden,
        score_memory=score_memory,
        always=always,
    )


def _measure_scores(model: Any) -> float:
    """Scores of two tokens that attention keeps for the backward pass, as a share of a token's memory.

    They are not counted for a family with other sizes in each layer, or under other names.
    """
    settings = model.config.get_text_config()
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    layers, heads, hidden = (getattr(settings, name, None) for name in names)
    if settings._attn_implementation != "eager" or not (
        isinstance(layers, int) and isinstance(heads, int) and isinstance(hidden, int)
    ):
        return 0.0
    score_bytes = layers * heads * (2 * _SCORE_BYTES if is_capped(model) else _SCORE_BYTES)
    return score_bytes / (4 * _KEPT_OUTPUTS * _count_passed(model) / hidden)


def _count_passed(model: Any) -> int:
    """Weights that a token is multiplied with, without those of the embedding and of the head."""
    settings = model.config.get_text_config()
    chosen = getattr(settings, "num_experts_per_tok", None) or getattr(settings, "moe_k", None) or 1
    heads = (model.get_input_embeddings(), model.get_output_embeddings())
    ends = {id(each.weight) for each in heads if each is not None}
    weights = [each for each in model.parameters() if each.dim() > 1 and id(each) not in ends]
    # Stacked experts have a third dimension: a token passes a few of them.
    return sum(each.numel() if each.dim() == 2 else each[0].numel() * chosen for each in weights)


class SharedPrompts:
    """Has the batches of one model share prompts, as its `TrainConfig` says.

    Args:
        model: before it is sharded.
        config: says when.
        head: of the model; scores of whole sequences are computed row by row.
    """

    def __init__(self, model: Any, config: TrainConfig, *, head: Head) -> None:
        wanted = config.shared_prompts
        self._costs: PromptSharing | None = None
        self._scores = _measure_scores(model)
        self._notice = ""
        if wanted is False or head == "score":
            return
        obstacle = find_obstacle(model, config)
        if obstacle is None:
            self._costs = _estimate(model, self._scores, always=wanted is True)
        else:
            self._notice = f"training.shared_prompts: rows with equal prompts are computed apart, because {obstacle}"

    def prepare(self, sequences: SequenceBatch) -> SequenceBatch:
        """The same batch, which shares prompts where it may. Warns at the first that could, if the model does not."""
        if self._notice and sequences.num_shared:
            notice, self._notice = self._notice, ""
            warnings.warn(notice, stacklevel=2)
        sequences.sharing, sequences.pair_memory = self._costs, self._scores
        return sequences
