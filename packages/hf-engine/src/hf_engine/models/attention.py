"""The function that computes attention in a model of transformers: one that drops nothing, or a user's choice.

transformers gives each function the same arguments, and a function ignores those that it does not know: torch's drops a
cap on logits without a message, while vLLM applies it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hf_protocols.errors import BackendError
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_engine.backends.train_config import AttentionFunction

__all__ = ["build_score_term", "choose_attention", "is_capped", "keep_cap"]


def build_score_term(sees: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask that all layers share: 0 where a query sees a key, -inf elsewhere.

    Of a mask of bool torch makes such a term in every layer, and keeps it for the backward pass.
    """
    return torch.zeros_like(sees, dtype=dtype).masked_fill_(~sees, -torch.inf)


def is_capped(model: Any) -> bool:
    """True if the model bounds the logits of attention, as Gemma 2 does."""
    return bool(getattr(model.config.get_text_config(), "attn_logit_softcapping", None))


def keep_cap(model: Any) -> None:
    """Has a loaded model with a cap compute attention by its own code, and leaves others to transformers' choice."""
    if is_capped(model):
        model.set_attn_implementation("eager")


def choose_attention(model: Any, wanted: AttentionFunction, device: torch.device) -> None:
    """Has a loaded model compute attention by a function; `"auto"` leaves it as it is.

    Args:
        model: on which `keep_cap` was called.
        wanted: by transformers' name.
        device: where the model will compute.

    Raises:
        BackendError: for a function that does not run, that transformers does not have for the model, or that leaves
            out the model's cap on logits.
    """
    if wanted == "auto":
        return
    label, name = f"attn_implementation={show(wanted)}", type(model).__name__
    if wanted == "sdpa" and is_capped(model):
        raise BackendError(
            f"{label}: a {name} has attn_logit_softcapping, which torch's function leaves out. Use 'eager', or "
            "'flex_attention' on a GPU"
        )
    if wanted == "flex_attention" and device.type == "cpu":
        raise BackendError(f"{label}: torch's function has no backward pass on a CPU. Use 'auto'")
    try:
        model.set_attn_implementation(wanted)
        is_set = model.config.get_text_config()._attn_implementation == wanted
    except (ValueError, ImportError):
        is_set = False
    if not is_set:
        raise BackendError(f"{label}: transformers does not have it for a {name}. Use 'auto'")
